"""Tells a Llama, Mistral or Qwen2 from a model that only bears the name: from config.json alone, before anything is read.

transformers reads such a model without a word, leaving out what it does not know; source and graft would then be
measured against the same mistake.
"""

import math
import re
from pathlib import Path

from transformers import PretrainedConfig


LANGUAGE_MODELS = {
    "llama": ("LlamaForCausalLM", "LLaMAForCausalLM", "LLaMaForCausalLM"),
    "mistral": ("MistralForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
}
# Fields that change what a model computes. Neutral are null, false, 0 and an empty list, and for these groups: 1, ...
FACTORS = {
    "attn_temperature",
    "emb_scale",
    "embedding_scale",
    "logit_scale",
    "logits_scale",
    "partial_rotary_factor",
    "residual_scale",
    "rope_pct",
    "rope_percent",
    "rotary_pct",
    "rotary_percent",
    "scale_depth",
    "scale_emb",
}
FACTOR_ENDING = re.compile(r"(_multipliers?|_scaling|_scale_factor)$")
# ... one rotated or attended position in one, ...
ALL_OR_NOTHING = {"no_rope_layers": 1, "layer_types": "full_attention", "rope_layers": 1}
# ... a number that follows from the heads or the context, ...
DERIVED = {"attention_multiplier", "query_pre_attn_scalar", "rotary_dim", "sliding_window"}
# ... or nothing else
SWITCHES = {
    "add_cross_attention",
    "alibi",
    "attention_sink",
    "attention_sinks",
    "attn_temperature_tuning",
    "bidirectional",
    "clip_qkv",
    "deepnorm",
    "embedding_norm",
    "first_k_dense_replace",
    "kv_lora_rank",
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_routed_experts",
    "n_shared_experts",
    "no_rope_layer_interval",
    "num_experts",
    "num_experts_per_tok",
    "num_local_experts",
    "parallel_attn",
    "parallel_block",
    "parallel_residual",
    "post_norm",
    "q_lora_rank",
    "qk_clip",
    "qk_layernorm",
    "qk_norm",
    "query_key_norm",
    "rope_interleaved",
    "rotary_interleaved",
    "sandwich_norm",
    "shared_intermediate_size",
    "use_alibi",
    "use_bidirectional_attention",
    "use_mla",
    "use_nope",
    "use_parallel_residual",
    "use_qk_norm",
}
SWITCH_ENDING = re.compile(r"(_softcap|_softcapping|_soft_cap|_qk_norm|_num_experts)$")
# Of transformers, old and new, for models of every family: nothing of what is computed
OF_EVERY_MODEL = {"architectures", "model_type", "torch_dtype", "rope_theta", "rope_scaling", "transformers_version"}


def refuse_lookalike(stated: dict, own: PretrainedConfig, folder: Path):
    """`stated` is config.json as it stands, `own` the same as its family reads it.

    Raises:
        ValueError: code of its own, another head, or a field of the lists above that is not neutral.
    """
    auto_map = stated.get("auto_map")
    if isinstance(auto_map, dict) and (foreign := [name for name in auto_map if name.startswith("AutoModel")]):
        raise ValueError(
            f"{folder} brings model code of its own (auto_map: {auto_map[foreign[0]]}), which may compute anything: if its "
            f"weights are a plain {own.model_type}'s, remove auto_map from config.json and check the answers of that model"
        )
    known, named = LANGUAGE_MODELS[own.model_type], stated.get("architectures") or []
    if others := [name for name in (named if isinstance(named, list) else [named]) if name not in known]:
        raise ValueError(
            f"{folder} has architecture {others[0]!r}, and only {known[0]} can be grafted: load it as {known[0]} "
            "and save that, if that is what its weights are"
        )
    for name, value in _fields(stated):
        if _computes(name, own) and not _is_neutral(name, value, own):
            raise ValueError(
                f"{folder} sets {name} = {value!r}, which transformers' {own.model_type} leaves out and the model was trained "
                f"with: no graft of it is exact; if it means nothing here, remove {name} from config.json"
            )


def unread_fields(stated: dict, own: PretrainedConfig) -> list[str]:
    """Names in config.json that transformers keeps and its model does not read, in the order of the file."""
    read = {*type(own)().to_dict(), *OF_EVERY_MODEL}
    return [name for name in stated if name not in read]


def _fields(stated: dict) -> list[tuple[str, object]]:
    """Every field, those within the settings of RoPE too."""
    inner = [stated.get(name) for name in ("rope_parameters", "rope_scaling")]
    return [*stated.items(), *(item for values in inner if isinstance(values, dict) for item in values.items())]


def _computes(name: str, own: PretrainedConfig) -> bool:
    # What the family itself reads
    if name == "rope_scaling" or (name in ("sliding_window", "layer_types") and own.model_type != "llama"):
        return False
    listed = name in FACTORS | SWITCHES | DERIVED | set(ALL_OR_NOTHING)
    return listed or bool(FACTOR_ENDING.search(name) or SWITCH_ENDING.search(name))


def _is_neutral(name: str, value, own: PretrainedConfig) -> bool:
    if value is None or value is False or value == [] or value == {}:
        return True
    head_dim = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    if name == "sliding_window":
        is_off = getattr(own, "use_sliding_window", None) is False
        return is_off or (_is_number(value) and value >= own.max_position_embeddings)
    if name == "attention_multiplier":
        return _is_number(value) and math.isclose(value, head_dim**-0.5, rel_tol=1e-6)
    if name in ("query_pre_attn_scalar", "rotary_dim"):
        return value == head_dim
    if name in ALL_OR_NOTHING:
        return isinstance(value, list) and all(item == ALL_OR_NOTHING[name] for item in value)
    if name in FACTORS or FACTOR_ENDING.search(name):
        return value == 1 and value is not True
    return value == 0


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
