"""Measures the source model on text: its sites' statistics, the gains of every candidate, and what each would cost.

Calibration reads the source's own states, through hooks on its norms, and looks at them in the basis in which the graft
will live. The first token of a window carries a massive activation in many models; it is left out of the fit of r and c,
which it would rule.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

from evaluation.perplexity import input_device
from modeling_bhyt.configuration_bhyt import Site
from modeling_bhyt.normalization_bhyt import bhyt, mean_square


NORM_OF_SITE: dict[Site, str] = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}
SiteKey = tuple[int, Site]


class Basis(Protocol):
    """How a site looks where the graft lives; x (..., D) is a norm's input, gamma its gain, g the output's gradient."""

    name: str

    def state(self, x: Tensor) -> Tensor: ...

    def gain(self, gamma: Tensor) -> Tensor: ...

    def gradient(self, g: Tensor, gamma: Tensor) -> Tensor: ...


class OriginalBasis:
    """The source's own."""

    name = "original"

    def state(self, x: Tensor) -> Tensor:
        return x

    def gain(self, gamma: Tensor) -> Tensor:
        return gamma

    def gradient(self, g: Tensor, gamma: Tensor) -> Tensor:
        return g


class Candidate(NamedTuple):
    """One way to graft a site: in which basis, with which lambda, under its own mean square or under an estimate."""

    basis: str
    lam: float
    is_exact: bool


def site_norms(model: PreTrainedModel) -> Iterator[tuple[int, Site, torch.nn.Module]]:
    """(layer, site, norm) of every pre-norm, in the order in which a token meets them."""
    for layer_idx, layer in enumerate(model.model.layers):
        for site, name in NORM_OF_SITE.items():
            yield layer_idx, site, getattr(layer, name)


@contextmanager
def watch_norms(model: PreTrainedModel, see: Callable[[int, Site, Tensor, Tensor], None]):
    """Calls `see(layer, site, x, y)` with every norm's input and output while the model runs. Both are (B, T, D)."""

    def hook(layer_idx: int, site: Site):
        return lambda module, arguments, output: see(layer_idx, site, arguments[0], output)

    handles = [norm.register_forward_hook(hook(layer, site)) for layer, site, norm in site_norms(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def run_over(model: PreTrainedModel, windows: Tensor, batch_size: int, see: Callable, description: str):
    """Runs the model's blocks over windows (N, T) of token ids, showing `see` every norm's input, in fp32."""
    with watch_norms(model, lambda layer, site, x, y: see(layer, site, x.float())):
        for batch in track(windows.split(batch_size), description=description):
            model.model(input_ids=batch.to(input_device(model)), use_cache=False)


class BlockStatistics:
    """Mean squares of every block's input and of the second site's, a number a token, without each window's first."""

    def __init__(self, num_layers: int):
        self._seen: dict[SiteKey, list[Tensor]] = {
            (layer, site): [] for layer in range(num_layers) for site in NORM_OF_SITE
        }

    def see(self, layer: int, site: Site, x: Tensor):
        self._seen[layer, site].append(mean_square(x)[:, 1:].flatten().cpu())

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """(mean squares of the block's input, of the second site's input), fp64, one a token."""
        first, second = (torch.cat(self._seen[layer, site]).double() for site in NORM_OF_SITE)
        return first, second


def norm_in_basis(basis: Basis, gamma: Tensor, x: Tensor, own: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x, y) of a source's RMSNorm as `basis` shows them, fp32; `own` is the mean square of x."""
    state = basis.state(x.float())
    return state, basis.gain(gamma.to(x.device).float()) * state / torch.sqrt(own + eps)


def tanh_of_site(x: Tensor, lam: float, kappa: float, ms: Tensor, eps: float) -> Tensor:
    """Equation 2 at gamma = 1."""
    return bhyt(x, torch.tensor(1.0), torch.tensor(lam), kappa, ms, eps)


class GainFit:
    """Least squares of a site's gain, a channel at a time: gamma' = sum(t y) / sum(t^2) over tokens.

    y is the source norm's output, t the tanh that the graft will compute for the same token.
    """

    def __init__(self, size: int):
        self.ty = torch.zeros(size, dtype=torch.float64)
        self.tt = torch.zeros(size, dtype=torch.float64)

    def add(self, t: Tensor, y: Tensor):
        # Sums of one batch are short enough for fp32; they are added up in fp64
        self.ty += (t * y).sum((0, 1)).cpu()
        self.tt += (t * t).sum((0, 1)).cpu()

    def gain(self, limit: Tensor) -> Tensor:
        """gamma', fp64 (D,). A channel that is 0 in every token keeps `limit`."""
        return torch.where(self.tt > 0, self.ty / self.tt.clamp(min=torch.finfo(torch.float64).tiny), limit)
