"""The graft in closed form: from a source's statistics to the tensors of a BHyT checkpoint."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from modeling_bhyt import BHyTLlamaConfig, BHyTLlamaForCausalLM
from modeling_bhyt.configuration_bhyt import Site
from modeling_bhyt.normalization_bhyt import attention_variance, mean_square

from .arguments import GraftArguments
from .calibration import NORM_OF_SITE, BlockStatistics, GainFit, fit_ratio_and_offset, run_over
from .source import Source


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

    @property
    def is_estimated(self) -> bool:
        return self.ratio is not None

    def statistic(self, own: Tensor, block_input: Tensor) -> Tensor:
        """The mean square that the site normalises by."""
        if self.ratio is None or self.offset is None:
            return own
        return self.ratio * block_input + self.offset

    def tensors(self, prefix: str) -> dict[str, Tensor]:
        values: dict[str, Any] = {"weight": self.gain, "lam": [self.lam]}
        if self.is_estimated:
            values |= {"variance_ratio": [self.ratio], "variance_offset": [self.offset]}
        tensors = {f"{prefix}.{name}": torch.as_tensor(value).to(self.dtype) for name, value in values.items()}
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                dtype = str(self.dtype).removeprefix("torch.")
                raise ValueError(f"{name} does not fit {dtype}: take a larger lambda, or --dtype bfloat16 or float32")
        return tensors


@dataclass
class Graft:
    """Everything that the graft decided."""

    config: BHyTLlamaConfig
    sites: dict[tuple[int, Site], GraftedSite] = field(default_factory=dict)


def rounded(value: float, dtype: torch.dtype) -> float:
    """`value` as `dtype` holds it; refused where that is infinite."""
    result = torch.tensor(value, dtype=torch.float64).to(dtype).item()
    if not math.isfinite(result):
        raise ValueError(f"{value:g} becomes {result:g} in {str(dtype).removeprefix('torch.')}: take another --dtype")
    return result


def output_dtype(stored: torch.dtype, requested: str) -> torch.dtype:
    return stored if requested == "auto" else getattr(torch, requested)


def bhyt_config(source: Source, arguments: GraftArguments) -> BHyTLlamaConfig:
    """The source's configuration with BHyT's fields: made afresh, so that nothing calls it a Llama any more."""
    values = source.config.to_dict()
    for name in ("model_type", "architectures", "auto_map", "transformers_version", "dtype", "_name_or_path"):
        values.pop(name, None)
    if ours := sorted(set(values) & set(BHyTLlamaConfig.__annotations__) - {"rms_norm_eps"}):
        raise ValueError(f"the source's config.json has the field {ours[0]!r}, which would be ours: remove it")

    def number_or_list(numbers: list[float]):
        return numbers[0] if len(numbers) == 1 else numbers

    config = BHyTLlamaConfig(
        **values,
        norm_type="bhyt",
        kappa=arguments.kappa,
        attention_lambda=number_or_list(arguments.attention_lambda),
        mlp_lambda=number_or_list(arguments.mlp_lambda),
        variance_estimator=arguments.variance_estimator,
        exact_variance_layers=arguments.exact_layers,
    )
    assert config.model_type == "bhyt_llama"
    return config


def fit_graft(source: Source, config: BHyTLlamaConfig, windows: Tensor, arguments: GraftArguments) -> Graft:
    """Fits every site to the source's own states over `windows` (N, T) of token ids, in two passes.

    The first measures each block's mean squares and fits the gains before the attention; then r and c of every layer
    are known, and the second fits the gains before the MLP under the statistic that the graft will use.
    """
    model, eps, num_layers = source.model, config.rms_norm_eps, config.num_hidden_layers
    graft = Graft(config)
    # A model is run in one dtype, that of its embeddings, even where norms are stored in another
    run_dtype = output_dtype(source.tensors["model.embed_tokens.weight"].dtype, arguments.dtype)
    for layer in range(num_layers):
        for site, name in NORM_OF_SITE.items():
            stored = source.tensors[f"model.layers.{layer}.{name}.weight"].dtype
            dtype = output_dtype(stored, arguments.dtype)
            graft.sites[layer, site] = GraftedSite(rounded(config.site_lambda(site, layer), run_dtype), dtype)

    def fits(site: Site) -> list[GainFit]:
        norms = [getattr(layer, NORM_OF_SITE[site]) for layer in model.model.layers]
        return [GainFit(norm, graft.sites[i, site].lam, config.kappa, eps) for i, norm in enumerate(norms)]

    statistics, attention_fits, mlp_fits = BlockStatistics(num_layers), fits("attention"), fits("mlp")

    def see_first(layer: int, site: Site, x: Tensor):
        statistics.see(layer, site, x)
        if site == "attention":
            attention_fits[layer].see(x, mean_square(x))

    run_over(model, windows, arguments.batch_size, see_first, "calibrating, 1 of 2")
    for layer in range(num_layers):
        graft.sites[layer, "attention"].gain = attention_fits[layer].gain()
    for layer in config.estimated_layers:
        second = graft.sites[layer, "mlp"]
        ratio, offset = _ratio_and_offset(layer, model, config, graft, statistics)
        second.ratio, second.offset = rounded(ratio, run_dtype), rounded(offset, run_dtype)

    block_input: dict[int, Tensor] = {}

    def see_second(layer: int, site: Site, x: Tensor):
        if site == "attention":
            block_input[layer] = mean_square(x)
        else:
            mlp_fits[layer].see(x, graft.sites[layer, "mlp"].statistic(mean_square(x), block_input.pop(layer)))

    run_over(model, windows, arguments.batch_size, see_second, "calibrating, 2 of 2")
    for layer in range(num_layers):
        graft.sites[layer, "mlp"].gain = mlp_fits[layer].gain()
    return graft


def _ratio_and_offset(
    layer: int, model: LlamaForCausalLM, config: BHyTLlamaConfig, graft: Graft, statistics: BlockStatistics
) -> tuple[float, float]:
    if config.second_site_estimator == "fitted":
        return fit_ratio_and_offset(*statistics.of_layer(layer))
    site, attention = graft.sites[layer, "attention"], model.model.layers[layer].self_attn
    refined = {}
    if config.second_site_estimator == "uniform_attention":
        biases = {"value_bias": attention.v_proj.bias, "output_bias": attention.o_proj.bias}
        refined = {"gamma": site.gain.to(site.dtype), **biases}
    with torch.no_grad():
        c = attention_variance(
            attention.v_proj.weight,
            attention.o_proj.weight,
            attention.head_dim,
            strength=site.lam / config.kappa,
            context_length=config.variance_context_length,
            **refined,
        )
    return 1.0, c


def grafted_tensors(source: Source, graft: Graft, dtype: str) -> dict[str, Tensor]:
    """The whole checkpoint by name: sites from the graft, everything else from the source, bit for bit."""
    tensors = {}
    left_out = {*source.norm_names, *source.recomputed}
    if source.config.tie_word_embeddings:
        left_out.add("lm_head.weight")
    for name in source.tensors:
        if name not in left_out:
            stored = source.tensors[name]
            tensors[name] = stored.to(output_dtype(stored.dtype, dtype))
    for (layer, site), grafted in graft.sites.items():
        tensors |= grafted.tensors(f"model.layers.{layer}.{NORM_OF_SITE[site]}")
    return tensors


def assemble(config: BHyTLlamaConfig, tensors: dict[str, Tensor]) -> BHyTLlamaForCausalLM:
    """A model that holds these very tensors, ready to be saved (not to be run: its RoPE tables are empty)."""
    with torch.device("meta"):
        model = BHyTLlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return model
