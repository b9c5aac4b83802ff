"""Which checkpoints have Llama's own block: a table of model types, and how each is told in Llama's configuration."""

from pathlib import Path

from transformers import LlamaConfig, PretrainedConfig

from checkpoints.settings import read_config

from .lookalikes import refuse_lookalike


# Why the block of a well-known family is not Llama's
REFUSED = {
    "cohere": "its blocks are parallel and use LayerNorm",
    "falcon": "it uses LayerNorm",
    "gemma": "its norms multiply by 1 + weight",
    "gemma2": "it normalises after attention and MLP too",
    "gemma3": "it normalises queries and keys",
    "gemma3_text": "it normalises queries and keys",
    "gpt2": "it uses LayerNorm",
    "gpt_neox": "it uses LayerNorm",
    "gptj": "it uses LayerNorm",
    "mixtral": "its MLP is a mixture of experts",
    "mpt": "it uses LayerNorm",
    "olmo": "it uses LayerNorm",
    "olmo2": "it normalises queries and keys",
    "opt": "it uses LayerNorm",
    "persimmon": "it uses LayerNorm",
    "phi": "it uses LayerNorm",
    "phi3": "its projections are fused",
    "qwen3": "it normalises queries and keys",
    "qwen3_moe": "its MLP is a mixture of experts",
    "smollm3": "some of its layers have no positions",
    "stablelm": "it uses LayerNorm",
    "starcoder2": "it uses LayerNorm",
}
# What LlamaConfig has, and no other family tells in another way
SHARED = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "attention_dropout",
    "rope_parameters",
    "dtype",
]


def llama_config(stated: dict, folder: Path) -> tuple[LlamaConfig, PretrainedConfig]:
    """(the same model in Llama's configuration, its own configuration).

    Raises:
        ValueError: a family whose block Llama's configuration cannot express, or a model that is not what its
            model_type says, with the reason.
    """
    model_type = str(stated.get("model_type"))
    if model_type == "bhyt_llama":
        raise ValueError(f"{folder} is a BHyT checkpoint already")
    if model_type not in ("llama", "mistral", "qwen2"):
        reason = REFUSED.get(model_type, "its block is not known to be Llama's")
        raise ValueError(
            f"{folder} has model_type {model_type!r}: {reason}; llama, mistral and qwen2 (without sliding window) can be grafted"
        )
    own = read_config(folder)
    if own.num_attention_heads < 1:
        raise ValueError(f"{folder} says num_attention_heads = {own.num_attention_heads}, where 1 or more should be")
    refuse_lookalike(stated, own, folder)
    if model_type != "llama":
        _refuse_sliding_window(own, folder)
    return as_llama(own), own


def as_llama(own: PretrainedConfig) -> LlamaConfig:
    """A Mistral's or Qwen2's configuration, or a Llama's own, in Llama's words."""
    if isinstance(own, LlamaConfig):
        return own
    values = {name: getattr(own, name) for name in SHARED}
    # Qwen2 has biases at q, k and v; Llama's flag adds one at o, which will be 0
    values["attention_bias"] = own.model_type == "qwen2"
    values["head_dim"] = getattr(own, "head_dim", None) or own.hidden_size // own.num_attention_heads
    return LlamaConfig(**values)


def _refuse_sliding_window(config: PretrainedConfig, folder: Path):
    window = config.sliding_window if getattr(config, "use_sliding_window", True) else None
    if window is not None and window < config.max_position_embeddings:
        raise ValueError(
            f"{folder} attends to a sliding window of {window} of {config.max_position_embeddings} positions, which Llama "
            f"does not: set max_position_embeddings to {window} in config.json to graft it as a model of that context"
        )
