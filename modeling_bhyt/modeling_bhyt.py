# Copyright 2026 The bhyt authors. Licensed under the Apache License, Version 2.0.
"""Llama with a choice of norms: only what differs from transformers' Llama is written here."""

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import initialization as init
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.utils import logging

from .configuration_bhyt import BHyTLlamaConfig, DepthBound, Site
from .constants_bhyt import constant_from_weights, constants_from_weights, running_module, whole
from .normalization_bhyt import (
    BHyT,
    BHyTSite,
    BHyTStar,
    BHyTStarSite,
    DyT,
    DyTSite,
    EmbeddingScale,
    EstimatingBHyTSite,
    EstimatingRMSNormSite,
    EstimatingSite,
    RMSNormSite,
)


logger = logging.get_logger(__name__)


def site_norm(config: BHyTLlamaConfig, site: Site, layer_idx: int) -> nn.Module:
    """The norm before the attention or the MLP of one block."""
    assert config.dyt_alpha is not None
    size, eps = config.hidden_size, config.rms_norm_eps
    estimates = site == "mlp" and layer_idx in config.estimated_layers
    bounded: dict[str, Any] = {
        "lam": config.site_lambda(site, layer_idx),
        "kappa": config.kappa,
        "eps": eps,
        "learnable_lambda": config.learnable_lambda,
    }
    match config.norm_type, estimates:
        case "bhyt", False:
            return BHyTSite(size, **bounded)
        case "bhyt", True:
            return EstimatingBHyTSite(size, **bounded, learnable_variance=config.learnable_variance)
        case "bhyt_star", _:
            return BHyTStarSite(size, **bounded)
        case "dyt", _:
            return DyTSite(size, alpha=config.dyt_alpha[0 if site == "attention" else 1])
        case "lns", _:
            return RMSNormSite(size, eps, scale=1 / math.sqrt(layer_idx + 1))
        case "rmsnorm", True:
            return EstimatingRMSNormSite(size, eps, learnable_variance=config.learnable_variance)
        case (("rmsnorm" | "peri_ln"), _):
            return RMSNormSite(size, eps)


def final_norm(config: BHyTLlamaConfig) -> nn.Module:
    assert config.dyt_alpha is not None
    if config.norm_type == "dyt":
        return DyT(config.hidden_size, alpha=config.dyt_alpha[2])
    if config.final_lambda is None:
        return LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
    bounded = BHyT if config.norm_type == "bhyt" else BHyTStar
    return bounded(config.hidden_size, config.final_lambda, config.kappa, config.rms_norm_eps, config.learnable_lambda)


class BHyTLlamaDecoderLayer(LlamaDecoderLayer):
    """Identical to LlamaDecoderLayer except:

    - both norms are those of `config.norm_type`;
    - the first site's mean square travels to the second, which may then do without a reduction.
    """

    def __init__(self, config: BHyTLlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.input_layernorm = site_norm(config, "attention", layer_idx)
        self.post_attention_layernorm = site_norm(config, "mlp", layer_idx)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attention_input, mean_square = self.input_layernorm(hidden_states)
        attention_output, _ = self.self_attn(hidden_states=attention_input, **kwargs)
        hidden_states = hidden_states + attention_output
        mlp_input, _ = self.post_attention_layernorm(hidden_states, mean_square)
        return hidden_states + self.mlp(mlp_input)


class BHyTLlamaPeriDecoderLayer(BHyTLlamaDecoderLayer):
    """Identical to BHyTLlamaDecoderLayer except:

    - the outputs of attention and MLP are normalised too, before they are added (Peri-LN, arXiv 2502.02732; without
      its optional norm after the embedding).
    """

    def __init__(self, config: BHyTLlamaConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.attention_output_layernorm = RMSNormSite(config.hidden_size, config.rms_norm_eps)
        self.mlp_output_layernorm = RMSNormSite(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attention_input, mean_square = self.input_layernorm(hidden_states)
        attention_output, _ = self.self_attn(hidden_states=attention_input, **kwargs)
        attention_output, _ = self.attention_output_layernorm(attention_output)
        hidden_states = hidden_states + attention_output
        mlp_input, _ = self.post_attention_layernorm(hidden_states, mean_square)
        mlp_output, _ = self.mlp_output_layernorm(self.mlp(mlp_input))
        return hidden_states + mlp_output


class BHyTLlamaPreTrainedModel(LlamaPreTrainedModel):
    """Identical to LlamaPreTrainedModel except:

    - a checkpoint that lacks a tensor of ours, a plain Llama's for one, is refused instead of being filled at random;
    - constants (r, c, a lambda that is not learned) stay frozen after a load, which forgets `requires_grad`;
    - initialised (not loaded), the estimator's constants are computed from the weights.
    """

    config_class = BHyTLlamaConfig
    _no_split_modules = ["BHyTLlamaDecoderLayer", "BHyTLlamaPeriDecoderLayer"]

    def __init__(self, config: BHyTLlamaConfig, *args, **kwargs):
        # Overrides given to from_pretrained are set one by one and reach no class validator before this
        config.validate()
        # By name: super() would go through LlamaModel and its kin, which build Llama's own blocks
        LlamaPreTrainedModel.__init__(self, config, *args, **kwargs)

    def post_init(self):
        super().post_init()
        # FSDP's wrap policy refuses a name that no module has
        present = {type(module).__name__ for module in self.modules()}
        self._no_split_modules = {name for name in self._no_split_modules if name in present}

    def _init_weights(self, module: nn.Module):
        if values := getattr(module, "initial_values", None):
            for name, value in values.items():
                init.constant_(getattr(module, name), value)
            if isinstance(module, EstimatingSite):
                self._init_variance_offset(module)
        else:
            super()._init_weights(module)

    def _init_variance_offset(self, site: EstimatingSite):
        """c of a site from the weights of its block, which are initialised before their last norm. A collective where
        the weights are sharded; nothing where c was loaded, or where weights are yet to come (meta device).

        Raises:
            ValueError: weights that are not plain numbers here.
        """
        block = next(block for block in self.modules() if getattr(block, "post_attention_layernorm", None) is site)
        is_loaded = getattr(site.variance_offset, "_is_hf_initialized", False)
        if not is_loaded and not any(parameter.is_meta for parameter in block.parameters()):
            init.constant_(site.variance_offset, constant_from_weights(block, self.config))

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *model_args, output_loading_info: bool = False, **kwargs):
        model, loading_info = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
        )
        stored_type = model.config.model_type
        if kwargs.get("config") is not None and pretrained_model_name_or_path is not None:
            # A configuration that the caller brings hides the checkpoint's own
            stored, _ = cls.config_class.get_config_dict(pretrained_model_name_or_path, **kwargs)
            stored_type = stored.get("model_type", stored_type)
        refuse_foreign_checkpoint(str(pretrained_model_name_or_path), stored_type, loading_info["missing_keys"])
        model.freeze_constants()
        return (model, loading_info) if output_loading_info else model

    def save_pretrained(self, *args, **kwargs):
        """Identical to LlamaPreTrainedModel's except: a model that FSDP2 sharded is saved by the name of the class it had.

        FSDP2 gives it one made at run time, which no file holds, and transformers would name that in auto_map.
        """
        running = type(self)
        self.__class__ = next(kind for kind in running.__mro__ if not issubclass(kind, FSDPModule))
        try:
            super().save_pretrained(*args, **kwargs)
        finally:
            self.__class__ = running

    def freeze_constants(self):
        """Sets `requires_grad` of every lambda, r and c as the configuration says. Called after every load."""
        for module in self.modules():
            if isinstance(module, BHyT):
                module.lam.requires_grad_(module.learnable_lambda)
            if isinstance(module, EstimatingSite):
                module.variance_ratio.requires_grad_(module.learnable_variance)
                module.variance_offset.requires_grad_(module.learnable_variance)

    def depth_bounds(self) -> list[DepthBound]:
        """Theorem 3.5's condition at every site for the current parameters: lambda as learned, rms(gamma) as it is.

        A collective where the parameters are sharded.
        """
        bounds = []
        for layer_idx, layer in enumerate(self.base_model.layers):
            norms: dict[Site, nn.Module] = {"attention": layer.input_layernorm, "mlp": layer.post_attention_layernorm}
            for site, norm in norms.items():
                if self.config.norm_type in ("bhyt", "bhyt_star"):
                    nominal = whole(norm.lam, (1,)).abs().item() / self.config.kappa
                    gain = whole(norm.weight, (self.config.hidden_size,)).float().pow(2).mean().sqrt().item()
                    limit = 1 / math.sqrt(self.config.num_hidden_layers)
                    bounds.append(DepthBound(layer_idx, site, nominal, gain * nominal, limit))
        return bounds

    def variance_constants(self) -> dict[int, tuple[float, float]]:
        """(r, c) of each layer that estimates, as they are. A collective where the parameters are sharded."""
        norms = self._estimating_norms()
        return {
            n: (whole(s.variance_ratio, (1,)).item(), whole(s.variance_offset, (1,)).item()) for n, s in norms.items()
        }

    @torch.no_grad()
    def set_variance_constants(self, constants: dict[int, tuple[float, float]]):
        """Gives layers their (r, c). Under FSDP2, call it on every process and between two steps.

        Where PEFT keeps a trained copy of the norm (modules_to_save), the copy gets them and the original keeps its
        own, which belong to the model without the adapter. Without a copy the base's norm gets them: merge and save
        the whole model then, since an adapter's own checkpoint does not carry them.
        """
        norms = self._estimating_norms()
        for layer_idx, (ratio, offset) in constants.items():
            # In place: of a sharded constant most processes hold no number
            norms[layer_idx].variance_ratio.fill_(ratio)
            norms[layer_idx].variance_offset.fill_(offset)

    def _estimating_norms(self) -> dict[int, nn.Module]:
        layers = self.base_model.layers
        return {n: running_module(layers[n].post_attention_layernorm) for n in self.config.estimated_layers}

    @torch.no_grad()
    def variance_constants_from_weights(self) -> dict[int, float]:
        """c of "published" and "uniform_attention" for each layer that estimates, for the current weights.

        Under FSDP2 and tensor parallelism the weights are gathered, so every process has to call it; under LoRA they
        are those of the merged model.

        Raises:
            ValueError: "fitted" constants, which only calibration gives, and weights that are not plain numbers here
                (4 or 8 bits, sharded by ZeRO-3 or FSDP1, offloaded, under an adapter that is not plain LoRA).
        """
        if self.config.second_site_estimator == "fitted":
            raise ValueError("variance_estimator 'fitted' comes from calibration, not from weights: see conversion")
        return constants_from_weights(self.base_model.layers, self.config)

    def refresh_variance_constants(self) -> dict[int, tuple[float, float]]:
        """Sets every c to that of `variance_constants_from_weights`, as `set_variance_constants` does, and logs the change.

        c is a constant of the checkpoint: nothing else ever changes it, so weights that were trained leave it behind
        until this is called.

        Returns:
            (old, new) c for each layer that estimates.

        Raises:
            ValueError: as `variance_constants_from_weights`; nothing is changed then.
        """
        computed, former = self.variance_constants_from_weights(), self.variance_constants()
        self.set_variance_constants({n: (former[n][0], new) for n, new in computed.items()})
        for layer_idx, new in computed.items():
            logger.info(f"layer {layer_idx}: c {former[layer_idx][1]:.6g} -> {new:.6g}")
        return {n: (former[n][1], new) for n, new in computed.items()}


def refuse_foreign_checkpoint(name: str, model_type: str, missing_keys: set[str]):
    """ValueError where a loaded checkpoint was not a whole BHyT one. A new classification head may be missing."""
    missing = sorted(key for key in missing_keys if not key.startswith(("score.", "qa_outputs.")))
    shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
    if model_type != BHyTLlamaConfig.model_type:
        lacks = f" and lacks {len(missing)} tensors of this model ({shown})" if missing else ""
        raise ValueError(
            f"{name} has model_type {model_type!r}, not 'bhyt_llama'{lacks}: a plain Llama checkpoint becomes a BHyT one with "
            "`python -m conversion graft SOURCE OUTPUT`"
        )
    if missing == ["lm_head.weight"]:
        raise ValueError(
            f"{name} is the base model alone, without lm_head.weight: load it with AutoModel, or save the whole model "
            "(BHyTLlamaForCausalLM) there"
        )
    if missing:
        raise ValueError(
            f"{name} lacks {len(missing)} tensors of this configuration ({shown}): complete the checkpoint, or make one with "
            "`python -m conversion graft SOURCE OUTPUT`"
        )


class BHyTLlamaModel(BHyTLlamaPreTrainedModel, LlamaModel):
    """Identical to LlamaModel except:

    - blocks and final norm are those of `config.norm_type`;
    - "dyt" scales the embeddings by a learned number.
    """

    def __init__(self, config: BHyTLlamaConfig):
        BHyTLlamaPreTrainedModel.__init__(self, config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        block = BHyTLlamaPeriDecoderLayer if config.norm_type == "peri_ln" else BHyTLlamaDecoderLayer

        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.embed_norm = EmbeddingScale(config.hidden_size) if config.norm_type == "dyt" else None
        self.layers = nn.ModuleList([block(config, layer_idx) for layer_idx in range(config.num_hidden_layers)])
        self.norm = final_norm(config)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False

        self.post_init()

    # Servers look for `position_ids` here. The cache and the embeddings come next by place; the cache's name differs
    # between versions of transformers
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, *args, inputs_embeds=None, **kwargs):
        is_by_place = len(args) > 1
        if is_by_place and inputs_embeds is not None:
            raise TypeError("forward() got inputs_embeds by place and by name")
        inputs_embeds = args[1] if is_by_place else inputs_embeds
        if self.embed_norm is not None and (input_ids is None) != (inputs_embeds is None):
            inputs_embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            input_ids, inputs_embeds = None, self.embed_norm(inputs_embeds)
        if is_by_place:
            args = (args[0], inputs_embeds, *args[2:])
        else:
            kwargs["inputs_embeds"] = inputs_embeds
        return super().forward(input_ids, attention_mask, position_ids, *args, **kwargs)


class BHyTLlamaForCausalLM(BHyTLlamaPreTrainedModel, LlamaForCausalLM):
    """Identical to LlamaForCausalLM except: the base is BHyTLlamaModel."""

    def __init__(self, config: BHyTLlamaConfig):
        BHyTLlamaPreTrainedModel.__init__(self, config)
        self.model = BHyTLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


# The generic heads would build their base by AutoModel, which needs consent to remote code: each builds its own here.


class BHyTLlamaForSequenceClassification(GenericForSequenceClassification, BHyTLlamaPreTrainedModel):
    def __init__(self, config: BHyTLlamaConfig):
        BHyTLlamaPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = BHyTLlamaModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class BHyTLlamaForTokenClassification(GenericForTokenClassification, BHyTLlamaPreTrainedModel):
    def __init__(self, config: BHyTLlamaConfig):
        BHyTLlamaPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = BHyTLlamaModel(config)
        # LlamaConfig has no field for it; transformers' own head reads this name where a configuration carries it
        self.dropout = nn.Dropout(getattr(config, "classifier_dropout", None) or 0.1)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class BHyTLlamaForQuestionAnswering(GenericForQuestionAnswering, BHyTLlamaPreTrainedModel):
    def __init__(self, config: BHyTLlamaConfig):
        BHyTLlamaPreTrainedModel.__init__(self, config)
        self.model = BHyTLlamaModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()


__all__ = [
    "BHyTLlamaForCausalLM",
    "BHyTLlamaForQuestionAnswering",
    "BHyTLlamaForSequenceClassification",
    "BHyTLlamaForTokenClassification",
    "BHyTLlamaModel",
    "BHyTLlamaPreTrainedModel",
]
