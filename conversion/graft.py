"""The graft in closed form: from a source's statistics to the tensors of a BHyT checkpoint."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from checkpoints.weights import LazyTensors
from modeling_bhyt import BHyTLlamaConfig
from modeling_bhyt.configuration_bhyt import Site
from modeling_bhyt.normalization_bhyt import attention_variance, fit_ratio_and_offset, fit_sums, mean_square

from .arguments import GraftArguments
from .calibration import (
    NORM_OF_SITE,
    Basis,
    BlockStatistics,
    Candidate,
    GainFit,
    SiteKey,
    norm_in_basis,
    run_over,
    tanh_of_site,
)
from .source import Source
from .tensors import output_dtype


@dataclass
class GraftedSite:
    """The parameters of one BHyT site, as numbers that the saved dtype holds exactly."""

    lam: float
    dtype: torch.dtype
    gain: Tensor = field(default_factory=lambda: torch.empty(0))
    ratio: float | None = None
    offset: float | None = None

    def __post_init__(self):
        if self.lam == 0:
            raise ValueError("lambda becomes 0 in the dtype of the checkpoint: take a larger one, or another --dtype")

    def statistic(self, own: Tensor, block_input: Tensor) -> Tensor:
        """The mean square that the site normalises by."""
        if self.ratio is None or self.offset is None:
            return own
        return self.ratio * block_input + self.offset

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        values: dict[str, Any] = {"weight": self.gain, "lam": [self.lam]}
        if self.ratio is not None:
            values |= {"variance_ratio": [self.ratio], "variance_offset": [self.offset]}
        tensors = {f"{prefix}.{name}": torch.as_tensor(value).to(self.dtype) for name, value in values.items()}
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                dtype = str(self.dtype).removeprefix("torch.")
                raise ValueError(f"{name} does not fit {dtype}: take a larger lambda, or --dtype bfloat16 or float32")
        return tensors


def rounded(value: float, dtype: torch.dtype) -> float:
    """`value` as `dtype` holds it; refused where that is infinite."""
    result = torch.tensor(value, dtype=torch.float64).to(dtype).item()
    if not math.isfinite(result):
        raise ValueError(f"{value:g} becomes {result:g} in {str(dtype).removeprefix('torch.')}: take another --dtype")
    return result


def bhyt_config(base: Source, arguments: GraftArguments, **choices) -> BHyTLlamaConfig:
    """The source's configuration with BHyT's fields: made afresh, so that nothing calls it a Llama any more."""
    values = base.config.to_dict()
    for name in ("model_type", "architectures", "auto_map", "transformers_version", "dtype", "_name_or_path"):
        values.pop(name, None)
    if ours := sorted(set(values) & set(BHyTLlamaConfig.__annotations__) - {"rms_norm_eps"}):
        raise ValueError(f"the source's config.json has the field {ours[0]!r}, which would be ours: remove it")
    config = BHyTLlamaConfig(
        **values,
        norm_type="bhyt",
        kappa=arguments.kappa,
        variance_estimator=arguments.variance_estimator,
        **choices,
    )
    assert config.model_type == "bhyt_llama"
    return config


class Sites(dict[SiteKey, dict[Candidate, GraftedSite]]):
    """Every site's candidates with their parameters, and what is the same for all of them."""

    def __init__(self, source: Source, base: Source, arguments: GraftArguments, candidates: dict):
        self.source, self.base, self.arguments = source, base, arguments
        self.kappa, self.eps = arguments.kappa, source.config.rms_norm_eps
        # A model is run in one dtype, that of its embeddings, even where norms are stored in another
        self.run_dtype = output_dtype(source.tensors["model.embed_tokens.weight"].dtype, arguments.dtype)
        self.gammas = {key: source.tensors[norm_name(key)] for key in candidates}
        for key, options in candidates.items():
            dtype = output_dtype(self.gammas[key].dtype, arguments.dtype)
            self[key] = {option: GraftedSite(rounded(option.lam, self.run_dtype), dtype) for option in options}

    def limit_gain(self, key: SiteKey, basis: Basis, lam: float) -> Tensor:
        """gamma * kappa / lambda, the gain to which the fit tends as lambda tends to 0."""
        return basis.gain(self.gammas[key]).double() * self.kappa / lam

    def outputs(self, key: SiteKey, basis: Basis, x: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        """(x, y) of the source's norm in `basis`, fp32."""
        return norm_in_basis(basis, self.gammas[key], x, own, self.eps)

    def tanh(self, site: GraftedSite, state: Tensor, own: Tensor, block_input: Tensor) -> Tensor:
        return tanh_of_site(state, site.lam, self.kappa, site.statistic(own, block_input), self.eps)


def norm_name(key: SiteKey) -> str:
    layer, site = key
    return f"model.layers.{layer}.{NORM_OF_SITE[site]}.weight"


def fit_sites(sites: Sites, bases: dict[str, Basis], windows: Tensor | None):
    """Fits every candidate to the source's own states over `windows` (N, T) of token ids, in two passes.

    The first measures each block's mean squares and fits the gains of all sites that measure their own; then r and c of
    every layer are known, and the second fits the gains under an estimate. Without windows the gains are the limit's.
    """
    statistics = BlockStatistics(sites.source.config.num_hidden_layers)
    _fit_gains(sites, bases, windows, is_exact=True, see_also=statistics.see)
    for (layer, _), options in sites.items():
        for option, grafted in options.items():
            if not option.is_exact:
                ratio, offset = _ratio_and_offset(sites, layer, statistics)
                grafted.ratio, grafted.offset = rounded(ratio, sites.run_dtype), rounded(offset, sites.run_dtype)
    _fit_gains(sites, bases, windows, is_exact=False)


def _fit_gains(sites: Sites, bases: dict[str, Basis], windows: Tensor | None, is_exact: bool, see_also=None):
    fits = {
        (key, option): GainFit(len(sites.gammas[key]))
        for key, options in sites.items()
        for option in options
        if option.is_exact == is_exact
    }
    block_input: dict[int, Tensor] = {}

    def see(layer: int, site: Site, x: Tensor):
        if see_also is not None:
            see_also(layer, site, x)
        own = mean_square(x)
        if site == "attention":
            block_input[layer] = own
        views = {name: sites.outputs((layer, site), basis, x, own) for name, basis in bases.items()}
        for option, grafted in sites[layer, site].items():
            if option.is_exact == is_exact:
                state, y = views[option.basis]
                t = sites.tanh(grafted, state, own, block_input[layer])
                fits[(layer, site), option].add(t, y)

    if windows is not None and fits:
        description = "calibrating, own statistics" if is_exact else "calibrating, estimates"
        run_over(sites.source.model, windows, sites.arguments.batch_size, see, description)
    for (key, option), fit in fits.items():
        sites[key][option].gain = fit.gain(sites.limit_gain(key, bases[option.basis], sites[key][option].lam))


def _ratio_and_offset(sites: Sites, layer: int, statistics: BlockStatistics) -> tuple[float, float]:
    arguments, config = sites.arguments, sites.base.config
    if arguments.variance_estimator == "fitted":
        return fit_ratio_and_offset(fit_sums(*statistics.of_layer(layer)))
    # Constants from weights follow the gain before the attention, where auto leaves one candidate beside the curve's
    first = next(iter(sites[layer, "attention"].values()))
    attention = f"model.layers.{layer}.self_attn"
    refined = {}
    if arguments.variance_estimator == "uniform_attention":
        refined["gamma"] = first.gain.to(first.dtype)
        for argument, name in (("value_bias", "v_proj.bias"), ("output_bias", "o_proj.bias")):
            if f"{attention}.{name}" in sites.base.tensors:
                refined[argument] = sites.base.tensors[f"{attention}.{name}"]
    c = attention_variance(
        sites.base.tensors[f"{attention}.v_proj.weight"],
        sites.base.tensors[f"{attention}.o_proj.weight"],
        config.head_dim,
        strength=first.lam / arguments.kappa,
        context_length=BHyTLlamaConfig.variance_context_length,
        **refined,
    )
    return 1.0, c


@dataclass
class Graft:
    """Everything that the graft decided: the configuration, and the parameters of every site."""

    config: BHyTLlamaConfig
    sites: dict[SiteKey, GraftedSite]


class GraftedTensors(LazyTensors):
    """The whole checkpoint by name, each tensor when it is asked for: sites from the graft, the rest from the base."""

    def __init__(self, base: Source, graft: Graft, dtype: str):
        self._base, self._dtype = base, dtype
        self._sites: dict[str, Tensor] = {}
        for key, site in graft.sites.items():
            self._sites |= site.tensors(norm_name(key).removesuffix(".weight"))
        self.names = [*base.kept_names(), *self._sites]

    def __getitem__(self, name: str) -> Tensor:
        if name in self._sites:
            return self._sites[name]
        stored = self._base.tensors[name]
        return stored.to(output_dtype(stored.dtype, self._dtype))
