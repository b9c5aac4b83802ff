"""Reads a Llama or a Qwen2 from a GGUF file: transformers' own reader takes the weights, everything it would guess or leave
out is read, checked or put right here."""

import math
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from gguf import GGUFReader
from transformers import (
    GgufConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from checkpoints.settings import check_chat_templates, read_tokenizer

from .gguf_tokenizer import byte_level_tokenizer, chat_templates, sentencepiece_tokenizer


# A Mistral without sliding window calls itself a llama
MODELS: dict[str, tuple[type[PreTrainedModel], type[PretrainedConfig]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
}
REFUSED = {
    "mistral3": "its queries grow with the position",
    "mistral4": "its attention is compressed and its MLP a mixture of experts",
}
UNQUANTIZED = {"F32", "F16", "BF16"}
TOKENS, TYPES, MERGES = (f"tokenizer.ggml.{part}" for part in ("tokens", "token_type", "merges"))
# Hyperparameters whose name says that they change what a block computes; harmless are 0, false and, of scales, 1
CHANGES = (
    "expert",
    "scale",
    "clamp",
    "softcap",
    "sliding_window",
    "temperature",
    "causal",
    "shared",
    "rope.scaling.attn",
)


class WholeFile(GGUFReader):
    """Identical to GGUFReader except: what would lie behind the end of the file is an error, not an empty array."""

    def _get(self, offset, dtype, count=1, override_order=None):
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > len(self.data):
            raise ValueError(f"it ends at byte {len(self.data)}, but something in it lies at {end}")
        return super()._get(int(offset), dtype, count, override_order)


def read_gguf(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, dict, str | None]:
    """The model in fp32 (quantised blocks become their dequantised values), its tokenizer, metadata and block types.

    Raises:
        ValueError: a file that is not whole, or an architecture, a tensor, a hyperparameter, a RoPE scaling or a
            vocabulary that cannot be carried over.
    """
    try:
        reader = WholeFile(path)
        values = {name: field.contents() for name, field in reader.fields.items() if "." in name}
        shapes = {tensor.name: [int(size) for size in reversed(tensor.shape)] for tensor in reader.tensors}
    except OSError:
        raise
    # Whatever the first byte that makes no sense runs into
    except Exception as error:
        raise ValueError(f"{path} is not a whole GGUF file: {error}") from error
    architecture = str(values.get("general.architecture"))
    _refuse_unknown(architecture, values)
    config = _config(values, shapes, architecture)
    _check_shapes(config, shapes, architecture)
    if scaling := _rope_scaling(values, reader, config, architecture):
        config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], **scaling}
    tokenizer = read_vocabulary(path, values)
    model = _model(path, MODELS[architecture][0], config)
    types = sorted({tensor.tensor_type.name for tensor in reader.tensors} - UNQUANTIZED)
    return model, tokenizer, values, ", ".join(types) or None


def _model(path: Path, model_class: type[PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    try:
        model, loading_info = model_class.from_pretrained(
            path.parent,
            gguf_file=path.name,
            config=config,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    except (MemoryError, OSError):
        raise
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}): take another copy of it"
        ) from error
    if missing := sorted(loading_info["missing_keys"]):
        raise ValueError(f"{path} lacks {', '.join(missing[:4])}: complete it")
    return model


def read_vocabulary(path: Path, values: dict) -> PreTrainedTokenizerBase:
    tokens, types, merges = (values.get(name) for name in (TOKENS, TYPES, MERGES))
    if not _are(tokens, str) or not tokens or len(set(tokens)) < len(tokens):
        raise ValueError(f"{path} has no {TOKENS}, or has one of them twice: its tokenizer cannot be read")
    if types is not None and (not _are(types, int) or len(types) != len(tokens)):
        raise ValueError(f"{path}: {TYPES} does not say for each of {len(tokens)} tokens what it is")
    if values.get("tokenizer.ggml.model") == "gpt2":
        if not _are(merges, str):
            raise ValueError(f"{path} has no {MERGES}: its tokenizer cannot be read")
        tokenizer = byte_level_tokenizer(values, tokens, types or [1] * len(tokens), merges)
    elif values.get("tokenizer.ggml.model") == "llama":
        backend = read_tokenizer(path.parent, gguf_file=path.name).backend_tokenizer
        tokenizer = sentencepiece_tokenizer(backend, values, tokens)
    else:
        raise ValueError(
            f"{path} has a vocabulary of kind {values.get('tokenizer.ggml.model')!r}: only 'gpt2' (BPE) and 'llama' are Llamas'"
        )
    tokenizer.chat_template = chat_templates(values)
    check_chat_templates(path, tokenizer)
    return tokenizer


def _are(values: Any, kind: type) -> TypeGuard[list]:
    return isinstance(values, list) and all(isinstance(value, kind) for value in values)


def _refuse_unknown(architecture: str, values: dict):
    if architecture not in MODELS:
        reason = f" ({REFUSED[architecture]})" if architecture in REFUSED else ""
        raise ValueError(
            f"the GGUF file holds architecture {architecture!r}{reason}: only llama and qwen2 can be grafted"
        )
    if values.get("split.count", 0) not in (0, 1):
        raise ValueError(
            f"the GGUF file is one of {values['split.count']}: merge them first (llama-gguf-split --merge)"
        )
    for name, value in values.items():
        changes = name.startswith(f"{architecture}.") and any(part in name for part in CHANGES)
        is_harmless = value in (0, 1 if "scale" in name else 0)
        if changes and not is_harmless or name.endswith("attention.causal") and value is False:
            raise ValueError(f"the GGUF file sets {name} = {value!r}, which has no place in a Llama")


def _config(values: dict, shapes: dict[str, list[int]], architecture: str) -> PretrainedConfig:
    """The configuration in transformers' words. Every count is a positive number that the tensors bear out later."""

    def number(key: str, default: float | None = None, kind: type = int) -> Any:
        value: Any = values.get(f"{architecture}.{key}", default)
        is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if not is_number or not 0 < value < 2**31:
            raise ValueError(f"the GGUF file says {architecture}.{key} = {value!r}, where a positive number should be")
        return value

    if len(embeddings := shapes.get("token_embd.weight", [])) != 2:
        raise ValueError("the GGUF file has no token_embd.weight of two dimensions")
    heads, width = number("attention.head_count"), number("embedding_length")
    head_dim = number("attention.key_length", number("rope.dimension_count", max(width // heads, 1)))
    rotated, value_length = number("rope.dimension_count", head_dim), number("attention.value_length", head_dim)
    if rotated != head_dim:
        raise ValueError(
            f"{architecture}.rope.dimension_count is {rotated} of {head_dim}: partly rotated heads are not Llama's"
        )
    if value_length != head_dim:
        raise ValueError(f"{architecture}.attention.value_length is {value_length}, and the key's {head_dim}")
    if architecture == "qwen2" and head_dim * heads != width:
        raise ValueError(f"qwen2 has {heads} heads of {head_dim} numbers, which do not make its width of {width}")
    tokens = {f"{name}_token_id": values.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    return MODELS[architecture][1](
        vocab_size=embeddings[0],
        hidden_size=width,
        intermediate_size=number("feed_forward_length"),
        num_hidden_layers=number("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=number("attention.head_count_kv", heads),
        max_position_embeddings=number("context_length"),
        # Stored in fp32: 9.999999747e-06 is the same number, and reads as 1e-05
        rms_norm_eps=float(str(np.float32(number("attention.layer_norm_rms_epsilon", kind=float)))),
        rope_parameters={"rope_type": "default", "rope_theta": float(number("rope.freq_base", 10000.0, float))},
        tie_word_embeddings="output.weight" not in shapes,
        pad_token_id=values.get("tokenizer.ggml.padding_token_id"),
        **tokens,
        **({"head_dim": head_dim} if architecture == "llama" else {}),
    )


def _check_shapes(config: PretrainedConfig, shapes: dict[str, list[int]], architecture: str):
    """Every tensor must have its place and its shape, every place a tensor."""
    d, ffn = config.hidden_size, config.intermediate_size
    head_dim = getattr(config, "head_dim", None) or d // config.num_attention_heads
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    block = {
        "attn_norm.weight": [d],
        "ffn_norm.weight": [d],
        "attn_q.weight": [queries, d],
        "attn_k.weight": [keys, d],
        "attn_v.weight": [keys, d],
        "attn_output.weight": [d, queries],
        "ffn_gate.weight": [ffn, d],
        "ffn_up.weight": [ffn, d],
        "ffn_down.weight": [d, ffn],
    }
    if architecture == "qwen2":
        block |= {"attn_q.bias": [queries], "attn_k.bias": [keys], "attn_v.bias": [keys]}
    top = {"token_embd.weight": [config.vocab_size, d], "output_norm.weight": [d]}
    optional = {"output.weight": [config.vocab_size, d], "rope_freqs.weight": [head_dim // 2]}
    num_blocks = len({name.split(".")[1] for name in shapes if name.startswith("blk.")})
    if config.num_hidden_layers != num_blocks:
        raise ValueError(f"the GGUF file says {config.num_hidden_layers} blocks and holds {num_blocks}: complete it")
    needed = top | {f"blk.{i}.{name}": shape for i in range(num_blocks) for name, shape in block.items()}
    if missing := sorted(needed.keys() - shapes.keys()):
        raise ValueError(f"the GGUF file lacks {len(missing)} tensors ({', '.join(missing[:4])}): complete it")
    for name, shape in shapes.items():
        place = (needed | optional).get(name)
        if place is None:
            raise ValueError(f"the GGUF file holds {name}, which has no place in a {architecture} of these blocks")
        if shape != place:
            raise ValueError(f"the GGUF file holds {name} of shape {shape}, where {place} should be")


def _rope_scaling(values: dict, reader: GGUFReader, config: PretrainedConfig, architecture: str) -> dict | None:
    """RoPE scaling as transformers spells it; None for a plain RoPE."""
    kind = values.get(f"{architecture}.rope.scaling.type", "none")
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"), None)
    if kind == "none" and factors is None:
        return None
    if kind == "linear" and factors is None:
        return {"rope_type": "linear", "factor": float(values[f"{architecture}.rope.scaling.factor"])}
    if kind == "none":
        return _llama3_scaling(torch.from_numpy(np.array(factors, dtype=np.float32)), config)
    raise ValueError(
        f"{architecture}.rope.scaling.type is {kind!r}: only 'linear' and Llama 3's rope_freqs can be carried over"
    )


def _llama3_scaling(factors: torch.Tensor, config: PretrainedConfig) -> dict:
    """Llama 3's scaling, proven by recomputing the file's `rope_freqs` (each frequency's divisor) from it."""
    plain = LlamaRotaryEmbedding(config).inv_freq
    largest = factors.max().item()
    context = config.max_position_embeddings
    guesses = {8192, context // round(largest)} if math.isfinite(largest) and largest >= 1 else set()
    for original in sorted(guess for guess in guesses if 0 < guess < context):
        scaling = {
            "rope_type": "llama3",
            "factor": largest,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        trial = config.__class__(**{**config.to_dict(), "rope_parameters": {**config.rope_parameters, **scaling}})
        if torch.allclose(plain / LlamaRotaryEmbedding(trial).inv_freq, factors, rtol=1e-3):
            return scaling
    raise ValueError("rope_freqs.weight is not Llama 3's RoPE scaling with factors 1 and 4: it cannot be carried over")
