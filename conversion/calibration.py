"""Measures the source model on text: what the graft's closed form needs, and the text itself if there is none.

Calibration reads the source's own states, through hooks on its norms. The first token of a window carries a massive
activation in many models; it is left out of the fit of r and c, which it would rule.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from rich.progress import Progress, track
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from evaluation.perplexity import adds_bos
from modeling_bhyt.configuration_bhyt import Site
from modeling_bhyt.normalization_bhyt import bhyt, mean_square


NORM_OF_SITE: dict[Site, str] = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}


def site_norms(model: LlamaForCausalLM) -> Iterator[tuple[int, Site, torch.nn.Module]]:
    """(layer, site, norm) of every pre-norm, in the order in which a token meets them."""
    for layer_idx, layer in enumerate(model.model.layers):
        for site, name in NORM_OF_SITE.items():
            yield layer_idx, site, getattr(layer, name)


@contextmanager
def watch_norms(model: LlamaForCausalLM, see: Callable[[int, Site, Tensor], None]):
    """Calls `see(layer, site, x)` with every norm's input while the model runs. x is (B, T, D), fp32."""

    def hook(layer_idx: int, site: Site):
        return lambda module, arguments: see(layer_idx, site, arguments[0].float())

    handles = [norm.register_forward_pre_hook(hook(layer, site)) for layer, site, norm in site_norms(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def run_over(model: LlamaForCausalLM, windows: Tensor, batch_size: int, see: Callable, description: str):
    """Runs the model's blocks over windows (N, T) of token ids, showing `see` every norm's input."""
    with watch_norms(model, see):
        for batch in track(windows.split(batch_size), description=description):
            model.model(input_ids=batch.to(model.device), use_cache=False)


class BlockStatistics:
    """Mean squares of every block's input and of the second site's, a number a token, without each window's first."""

    def __init__(self, num_layers: int):
        self._seen: dict[tuple[int, Site], list[Tensor]] = {
            (layer, site): [] for layer in range(num_layers) for site in NORM_OF_SITE
        }

    def see(self, layer: int, site: Site, x: Tensor):
        self._seen[layer, site].append(mean_square(x)[:, 1:].flatten())

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """(mean squares of the block's input, of the second site's input), fp64, one a token."""
        first, second = (torch.cat(self._seen[layer, site]).double() for site in NORM_OF_SITE)
        return first, second


def fit_ratio_and_offset(block_input: Tensor, second_site: Tensor) -> tuple[float, float]:
    """r, c >= 0 that minimise sum(((r m + c) / m' - 1)^2): non-negative least squares on the relative error.

    With two unknowns the solution is the free one if it is non-negative, else the better of the two edges.
    """
    a, b = block_input / second_site, 1 / second_site
    aa, ab, bb, at, bt = (a * a).sum(), (a * b).sum(), (b * b).sum(), a.sum(), b.sum()
    candidates = [(at / aa, torch.zeros_like(at)), (torch.zeros_like(bt), bt / bb)]
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        candidates.append(((bb * at - ab * bt) / determinant, (aa * bt - ab * at) / determinant))
    feasible = [(r, c) for r, c in candidates if r >= 0 and c >= 0]
    r, c = min(feasible, key=lambda rc: (rc[0] * a + rc[1] * b - 1).pow(2).sum().item())
    return r.item(), c.item()


class GainFit:
    """Least squares of a site's gain, a channel at a time: gamma' = sum(t y) / sum(t^2) over tokens.

    y is the source norm's output, t the tanh that the graft will compute for the same token.
    """

    def __init__(self, norm: torch.nn.Module, lam: float, kappa: float, eps: float):
        self.norm, self.lam, self.kappa, self.eps = norm, lam, kappa, eps
        self.ty = torch.zeros_like(norm.weight, dtype=torch.float64)
        self.tt = torch.zeros_like(self.ty)

    def see(self, x: Tensor, ms: Tensor):
        """x: the norm's input; ms: the mean square that the graft will normalise it by."""
        t = tanh_of_site(x, self.lam, self.kappa, ms, self.eps).double()
        # forward, not a call: a call would meet the hook that brought x here
        y = self.norm.forward(x).double()
        self.ty += (t * y).sum((0, 1))
        self.tt += (t * t).sum((0, 1))

    def gain(self) -> Tensor:
        """gamma', fp64 (D,). A channel that is 0 in every token keeps gamma * kappa / lambda, the limit at lambda 0."""
        limit = self.norm.weight.double() * self.kappa / self.lam
        return torch.where(self.tt > 0, self.ty / self.tt.clamp(min=torch.finfo(torch.float64).tiny), limit)


def tanh_of_site(x: Tensor, lam: float, kappa: float, ms: Tensor, eps: float) -> Tensor:
    """Equation 2 at gamma = 1."""
    return bhyt(x, torch.tensor(1.0), torch.tensor(lam), kappa, ms, eps)


# Rows that are sampled in one batch: a constant, so that the text depends on the seed alone
SAMPLED_TOGETHER = 16


class _Ticker(StoppingCriteria):
    """Advances a progress bar at every generated token, and stops nothing."""

    def __init__(self, progress: Progress, task):
        self.progress, self.task = progress, task

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs) -> Tensor:
        self.progress.advance(self.task)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


@torch.no_grad()
def sample_windows(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, num_windows: int, window_length: int, seed: int
) -> Tensor:
    """(num_windows, window_length) token ids sampled from the model itself at temperature 1.

    A window starts where a document would: with BOS where the tokenizer puts one, else with the EOS that ends the
    document before. The EOS that the model writes is followed by its next document.
    """
    start = tokenizer.bos_token_id if adds_bos(tokenizer) else tokenizer.eos_token_id
    if start is None:
        raise ValueError("the tokenizer has neither BOS nor EOS to start a sample with: give --calibration_text")
    torch.manual_seed(seed)
    # Whatever generate is not told comes from the model's own settings, penalties and beams included
    model.generation_config = GenerationConfig()
    chunks = [min(SAMPLED_TOGETHER, num_windows - done) for done in range(0, num_windows, SAMPLED_TOGETHER)]
    with Progress() as progress:
        task = progress.add_task("sampling text from the source", total=len(chunks) * (window_length - 1))
        ticker = StoppingCriteriaList([_Ticker(progress, task)])
        sampled = [
            model.generate(
                torch.full((rows, 1), start, device=model.device),
                attention_mask=torch.ones(rows, 1, dtype=torch.long, device=model.device),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=window_length - 1,
                min_new_tokens=window_length - 1,
                eos_token_id=None,
                pad_token_id=start,
                stopping_criteria=ticker,
            )
            for rows in chunks
        ]
    return torch.cat(sampled).cpu()
