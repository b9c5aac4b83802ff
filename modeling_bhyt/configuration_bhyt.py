# Copyright 2026 The bhyt authors. Licensed under the Apache License, Version 2.0.
"""Configuration of Llama models whose pre-norms are bounded hyperbolic tangents (BHyT, arXiv 2601.09719)."""

import difflib
import math
import sys
from dataclasses import field
from typing import TYPE_CHECKING, Literal, NamedTuple

import transformers


__version__ = "0.1.0"

if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 4):
    raise ImportError(
        f"bhyt needs transformers >= 5.4, but {transformers.__version__} is installed: pip install -U transformers"
    )

from huggingface_hub.dataclasses import strict  # noqa: E402
from transformers import LlamaConfig  # noqa: E402
from transformers.utils import logging  # noqa: E402


if TYPE_CHECKING:
    # transformers tells two versions of this code apart by this file and the files that it imports
    from .modeling_bhyt import BHyTLlamaModel  # noqa: F401


logger = logging.get_logger(__name__)

# Written to every config.json, whatever class was saved: each auto class finds its model in each folder.
AUTO_MAP = {
    "AutoConfig": "configuration_bhyt.BHyTLlamaConfig",
    "AutoModel": "modeling_bhyt.BHyTLlamaModel",
    "AutoModelForCausalLM": "modeling_bhyt.BHyTLlamaForCausalLM",
    "AutoModelForSequenceClassification": "modeling_bhyt.BHyTLlamaForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_bhyt.BHyTLlamaForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_bhyt.BHyTLlamaForQuestionAnswering",
}

# alpha at initialisation by width, (attention, everything else): Tables 11 and 12 of the DyT paper, arXiv 2503.10622.
# Depth makes no difference there, so a width in between takes its nearest neighbour (in ratio).
DYT_ALPHA_BY_WIDTH = {1024: (1.0, 1.0), 2048: (1.0, 0.5), 4096: (0.8, 0.2), 5120: (0.6, 0.15), 8192: (0.2, 0.05)}


Site = Literal["attention", "mlp"]


class DepthBound(NamedTuple):
    """Theorem 3.5's condition at one site: `lambda / kappa < 1 / sqrt(L)`.

    The theorem is stated at gamma = 1; `effective` is rms(gamma) * lambda / kappa, what the site's gain makes of it.
    """

    layer: int
    site: Site
    nominal: float
    effective: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.effective < self.limit


@strict
class BHyTLlamaConfig(LlamaConfig):
    r"""
    A `LlamaConfig` with the choice of the norm and its knobs. Symbols as in arXiv 2601.09719.

    Args:
        norm_type (`str`, defaults to `"bhyt"`):
            The norm at both sites of every block. `"bhyt"` (equations 2 and 3), `"bhyt_star"` (equation 1),
            `"rmsnorm"` (Llama's own), `"peri_ln"` (arXiv 2502.02732), `"lns"` (LayerNorm Scaling, arXiv 2502.05795),
            `"dyt"` (Dynamic Tanh, arXiv 2503.10622).
        kappa (`float` > 0, defaults to 10):
            kappa, how many standard deviations stay inside the bound: `kappa = 1 / sqrt(1 - p)`, p = 0.99.
        attention_lambda, mlp_lambda (`float` > 0 or a list with one for each layer, defaults to 1):
            lambda at the site before the attention and at the one before the MLP; initial values where it is learned.
        final_lambda (`float` > 0 or `None`, defaults to `None`):
            lambda of the final norm ("bhyt" and "bhyt_star"); `None` keeps RMSNorm there, which anchors the logits.
        learnable_lambda (`bool`, defaults to `True`): whether lambda is trained.
        learnable_variance (`bool`, defaults to `False`): whether the estimator's r and c are trained.
        variance_estimator (`str` or `None`, defaults to `None`):
            Where the second site's mean square `r * ms(x) + c` comes from, x being the block's input ("bhyt", and as
            an experiment "rmsnorm"). `"published"`: r = 1, c = equation 3; `"uniform_attention"`: the same with gamma
            and biases where they belong; `"fitted"`: r and c from calibration; `"exact"`: reduced at the site.
            `None`: "uniform_attention" for "bhyt", "exact" for all others.
        variance_context_length (`int` > 0, defaults to 1024):
            T of equation 3 in tokens. A constant of the checkpoint, never a batch's length.
        exact_variance_layers (`list[int]`, defaults to `[]`):
            Layers (from 0) that reduce at the second site all the same.
        dyt_alpha (three `float` > 0, defaults to the DyT paper's for this width):
            alpha at initialisation before the attention, before the MLP and at the end ("dyt" only).
        bhyt_version (`str`): the version of this code that wrote the configuration; another one warns.

    Raises:
        StrictDataclassFieldValidationError: a value of the wrong type.
        StrictDataclassClassValidationError: a value out of its range.
        ValueError: an unknown key that is nearly one of these.
    """

    model_type = "bhyt_llama"

    norm_type: Literal["bhyt", "bhyt_star", "rmsnorm", "peri_ln", "lns", "dyt"] = "bhyt"
    kappa: int | float = 10.0
    attention_lambda: int | float | list[int | float] = 1.0
    mlp_lambda: int | float | list[int | float] = 1.0
    final_lambda: int | float | None = None
    learnable_lambda: bool = True
    learnable_variance: bool = False
    variance_estimator: Literal["uniform_attention", "published", "fitted", "exact"] | None = None
    variance_context_length: int = 1024
    exact_variance_layers: list[int] = field(default_factory=list)
    dyt_alpha: list[int | float] | None = None
    bhyt_version: str = __version__
    # Llama's own annotation refuses the 0 or 1 that a YAML or JSON file may hold
    rms_norm_eps: int | float = 1e-6

    def __post_init__(self, **kwargs):
        kwargs.pop("auto_map", None)
        self._refuse_misspelled(kwargs)
        super().__post_init__(**kwargs)
        self.auto_map = dict(AUTO_MAP)
        if self.dyt_alpha is None:
            width = min(DYT_ALPHA_BY_WIDTH, key=lambda width: abs(math.log(width / max(self.hidden_size, 1))))
            attention, other = DYT_ALPHA_BY_WIDTH[width]
            self.dyt_alpha = [attention, other, other]
        for name in ("kappa", "attention_lambda", "mlp_lambda", "final_lambda", "dyt_alpha", "rms_norm_eps"):
            setattr(self, name, _as_float(getattr(self, name)))
        if self.bhyt_version != __version__:
            logger.warning_once(
                f"This checkpoint was written by bhyt {self.bhyt_version} and is read by bhyt {__version__}."
            )
            self.bhyt_version = __version__

    @staticmethod
    def _refuse_misspelled(unknown: dict):
        # Compared with the words in order, so that "lambda_attention" is near "attention_lambda"
        own = {_sorted_words(name): name for name in BHyTLlamaConfig.__annotations__ if name != "rms_norm_eps"}
        for key in unknown:
            if close := difflib.get_close_matches(_sorted_words(key), own, n=1, cutoff=0.855):
                raise ValueError(f"unknown field {key!r}: did you mean {own[close[0]]!r}?")

    def validate_bhyt(self):
        """Run by `validate()`, which the model calls again for values that were set after construction."""
        self._check_ranges()
        self._check_list_lengths()
        self._check_norm_combination()
        self._warn_where_depth_is_unbounded()

    def _check_ranges(self):
        for name in ("kappa", "attention_lambda", "mlp_lambda", "final_lambda", "dyt_alpha"):
            value = getattr(self, name)
            for number in value if isinstance(value, list) else [value]:
                if number is not None and not 0 < number < math.inf:
                    raise ValueError(f"{name} is {number}: give a finite number above 0")
        # A row of zeros, such as a padding token's embedding, would be divided by 0
        if not 0 < self.rms_norm_eps < math.inf:
            raise ValueError(f"rms_norm_eps is {self.rms_norm_eps}: give a finite number above 0")
        if self.num_hidden_layers < 1:
            raise ValueError(f"num_hidden_layers is {self.num_hidden_layers}: give at least 1 layer")
        if self.variance_context_length < 1:
            raise ValueError(f"variance_context_length is {self.variance_context_length}: give at least 1 token")

    def _check_list_lengths(self):
        for name in ("attention_lambda", "mlp_lambda"):
            value = getattr(self, name)
            if isinstance(value, list) and len(value) != self.num_hidden_layers:
                raise ValueError(
                    f"{name} has {len(value)} numbers for num_hidden_layers = {self.num_hidden_layers}: "
                    "give one for each layer, or a single number"
                )
        if len(self.dyt_alpha) != 3:
            raise ValueError(f"dyt_alpha has {len(self.dyt_alpha)} numbers: give three (attention, MLP, final)")
        for layer in self.exact_variance_layers:
            if not 0 <= layer < self.num_hidden_layers:
                raise ValueError(
                    f"exact_variance_layers names layer {layer}: layers run from 0 to {self.num_hidden_layers - 1}"
                )

    def _check_norm_combination(self):
        if self.variance_estimator not in (None, "exact") and self.norm_type not in ("bhyt", "rmsnorm"):
            raise ValueError(
                f"variance_estimator is {self.variance_estimator!r} with norm_type {self.norm_type!r}: "
                "only 'bhyt' and 'rmsnorm' estimate; leave it null"
            )
        if self.final_lambda is not None and self.norm_type not in ("bhyt", "bhyt_star"):
            raise ValueError(
                f"final_lambda is {self.final_lambda} with norm_type {self.norm_type!r}: "
                "only 'bhyt' and 'bhyt_star' have it; leave it null"
            )

    def _warn_where_depth_is_unbounded(self):
        broken = [bound for bound in self.depth_bounds() if not bound.holds]
        if broken:
            worst = max(broken, key=lambda bound: bound.nominal)
            logger.warning_once(
                f"lambda / kappa = {worst.nominal:.4g} at the {worst.site} site of layer {worst.layer} is not below "
                f"1 / sqrt(num_hidden_layers) = {worst.limit:.4g}: the depth bound (Theorem 3.5) does not hold at "
                f"{len(broken)} of {2 * self.num_hidden_layers} sites; a smaller lambda or a larger kappa restores it."
            )

    @property
    def second_site_estimator(self) -> str:
        """`variance_estimator`, with the norm's own in place of `None`."""
        return self.variance_estimator or ("uniform_attention" if self.norm_type == "bhyt" else "exact")

    @property
    def estimated_layers(self) -> list[int]:
        """Layers whose second site uses `r * ms(x) + c` instead of a reduction."""
        if self.second_site_estimator == "exact":
            return []
        return [layer for layer in range(self.num_hidden_layers) if layer not in self.exact_variance_layers]

    def site_lambda(self, site: Site, layer: int) -> float:
        """lambda at initialisation of one site."""
        value = self.attention_lambda if site == "attention" else self.mlp_lambda
        return value[layer] if isinstance(value, list) else value

    def depth_bounds(self) -> list[DepthBound]:
        """Theorem 3.5's condition at every site, at gamma = 1; empty for norms that it does not speak of."""
        if self.norm_type not in ("bhyt", "bhyt_star"):
            return []
        limit = 1 / math.sqrt(self.num_hidden_layers)
        return [
            DepthBound(layer, site, strength := self.site_lambda(site, layer) / self.kappa, strength, limit)
            for layer in range(self.num_hidden_layers)
            for site in ("attention", "mlp")
        ]


def _sorted_words(name: str) -> str:
    return "_".join(sorted(name.removeprefix("bhyt_").split("_")))


def _as_float(value):
    if isinstance(value, list):
        return [float(number) for number in value]
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        return math.copysign(math.inf, value)
    return None if value is None else float(value)


__all__ = ["AUTO_MAP", "BHyTLlamaConfig", "DepthBound", "__version__"]
