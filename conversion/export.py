"""The way back: a plain Llama checkpoint from a BHyT one, for runtimes that know no other."""

import torch
from rich.progress import track
from torch import Tensor
from transformers import LlamaConfig

from checkpoints.weights import LazyTensors
from evaluation.perplexity import input_device
from modeling_bhyt import BHyTLlamaConfig
from modeling_bhyt.configuration_bhyt import Site
from modeling_bhyt.normalization_bhyt import mean_square

from .calibration import NORM_OF_SITE, GainFit, watch_norms
from .graft import norm_name
from .source import Source


FINAL_NORM = "model.norm.weight"


def plain_config(source: Source) -> LlamaConfig:
    """The model's configuration as Llama's.

    Raises:
        ValueError: a norm that RMSNorm cannot stand in for.
    """
    config = source.config
    if config.norm_type in ("dyt", "peri_ln"):
        raise ValueError(
            f"{source.name} has norm_type {config.norm_type!r}, which no plain Llama computes: "
            "bhyt, bhyt_star, lns and rmsnorm can be exported"
        )
    ours = set(BHyTLlamaConfig.__annotations__) - {"rms_norm_eps"}
    dropped = ours | {"model_type", "architectures", "auto_map", "transformers_version"}
    return LlamaConfig(**{name: value for name, value in config.to_dict().items() if name not in dropped})


def fit_plain_gains(source: Source, windows: Tensor, batch_size: int) -> dict[str, Tensor]:
    """The RMSNorm gain that comes nearest to each norm of the model, by its name in the checkpoint.

    bhyt and bhyt_star: least squares on the model's own states, sum(z y) / sum(z^2) a channel, y the norm's output and
    z = x / sqrt(ms(x) + eps). lns: gamma / sqrt(l), which is exact. A channel that is 0 in every token gets
    gamma * lambda / kappa, the limit at lambda 0.
    """
    config = source.config
    if config.norm_type == "lns":
        return {
            norm_name((layer, site)): source.tensors[norm_name((layer, site))].double() * (layer + 1) ** -0.5
            for layer in range(config.num_hidden_layers)
            for site in NORM_OF_SITE
        }
    if config.norm_type == "rmsnorm" and not config.estimated_layers:
        return {}
    fits: dict[str, GainFit] = {}

    def see(name: str, x: Tensor, y: Tensor):
        x = x.float()
        z = x / torch.sqrt(mean_square(x) + config.rms_norm_eps)
        fits.setdefault(name, GainFit(config.hidden_size)).add(z, y.float())

    def see_site(layer: int, site: Site, x: Tensor, output: tuple):
        see(norm_name((layer, site)), x, output[0])

    model = source.model
    final = None
    if config.final_lambda is not None:
        final = model.model.norm.register_forward_hook(lambda module, inputs, y: see(FINAL_NORM, inputs[0], y))
    with torch.no_grad(), watch_norms(model, see_site):
        for batch in track(windows.split(batch_size), description="refitting gains"):
            model.model(input_ids=batch.to(input_device(model)), use_cache=False)
    if final is not None:
        final.remove()
    return {name: fit.gain(_limit_gain(source, name)) for name, fit in fits.items()}


def _limit_gain(source: Source, name: str) -> Tensor:
    gain = source.tensors[name].double()
    lam = name.removesuffix("weight") + "lam"
    return gain * source.tensors[lam].double() / source.config.kappa if lam in source.tensors else gain


class PlainTensors(LazyTensors):
    """The checkpoint as a plain Llama's: gains exchanged, lambda, r and c gone, everything else bit for bit."""

    def __init__(self, source: Source, gains: dict[str, Tensor]):
        self._tensors, self._gains = source.tensors, gains
        own = (".lam", ".variance_ratio", ".variance_offset")
        self.left_out = [name for name in source.tensors if name.endswith(own)]
        self.names = [name for name in source.tensors if name not in self.left_out]

    def account(self) -> dict:
        """Where each tensor of the model went, for the report."""
        return {
            "kept": len(self.names) - len(self._gains),
            "replaced": len(self._gains),
            "left_out": [f"{name} (no part of a Llama)" for name in self.left_out],
        }

    def __getitem__(self, name: str) -> Tensor:
        stored = self._tensors[name]
        return self._gains[name].to(stored.dtype) if name in self._gains else stored
