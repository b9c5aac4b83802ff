"""Reads a Llama from a GGUF file: what transformers' own reader leaves out is checked or put right here."""

from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader
from transformers import AutoTokenizer, GgufConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


TENSORS = {"token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"}
BLOCK_NORMS = ("attn_norm", "ffn_norm")
BLOCK_PROJECTIONS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
UNQUANTIZED = {"F32", "F16", "BF16"}


def read_gguf(path: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase, dict, str | None]:
    """The model in fp32 (quantised blocks become their dequantised values), its tokenizer, metadata and block types.

    Raises:
        ValueError: an architecture, a tensor or a RoPE scaling that Llama's configuration cannot carry over.
    """
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{path} is not a whole GGUF file: {error}") from error
    values = {
        name: field.contents() for name, field in reader.fields.items() if name.count(".") and "tokens" not in name
    }
    _refuse_unknown(values, reader)
    place = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model, loading_info = LlamaForCausalLM.from_pretrained(
        **place, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), output_loading_info=True
    )
    if missing := sorted(loading_info["missing_keys"]):
        named = ", ".join(missing[:4])
        raise ValueError(f"{path} lacks {len(missing)} tensors ({named}): complete it, or merge a split GGUF first")
    config = model.config
    # Stored in fp32: 9.999999747e-06 is the same number, and reads as 1e-05
    config.rms_norm_eps = float(str(np.float32(config.rms_norm_eps)))
    if scaling := _rope_scaling(values, reader, config):
        config.rope_parameters = {"rope_theta": config.rope_parameters["rope_theta"], **scaling}
        model.model.rotary_emb = LlamaRotaryEmbedding(config)
    tokenizer = AutoTokenizer.from_pretrained(**place)
    for flag in ("add_bos_token", "add_eos_token"):
        if f"tokenizer.ggml.{flag}" in values:
            setattr(tokenizer, flag, bool(values[f"tokenizer.ggml.{flag}"]))
    types = sorted({tensor.tensor_type.name for tensor in reader.tensors} - UNQUANTIZED)
    return model, tokenizer, values, ", ".join(types) or None


def _refuse_unknown(values: dict, reader: GGUFReader):
    architecture = values.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"the GGUF file holds architecture {architecture!r}: only 'llama' can be grafted")
    in_a_block = {f"{part}.weight" for part in BLOCK_NORMS + BLOCK_PROJECTIONS}
    for tensor in reader.tensors:
        known = tensor.name in TENSORS or (
            tensor.name.startswith("blk.") and tensor.name.split(".", 2)[2] in in_a_block
        )
        if not known:
            raise ValueError(f"the GGUF file holds {tensor.name}, which has no place in a Llama without biases")
    rotated, head = values.get("llama.rope.dimension_count"), values.get("llama.attention.key_length")
    if rotated and head and rotated != head:
        raise ValueError(f"llama.rope.dimension_count is {rotated} of {head}: partly rotated heads are not Llama's")


def _rope_scaling(values: dict, reader: GGUFReader, config) -> dict | None:
    """RoPE scaling as transformers spells it; None for a plain RoPE."""
    kind = values.get("llama.rope.scaling.type", "none")
    factors = next((tensor.data for tensor in reader.tensors if tensor.name == "rope_freqs.weight"), None)
    if kind == "none" and factors is None:
        return None
    if kind == "linear" and factors is None:
        return {"rope_type": "linear", "factor": float(values["llama.rope.scaling.factor"])}
    if kind == "none":
        return _llama3_scaling(torch.from_numpy(np.array(factors, dtype=np.float32)), config)
    raise ValueError(
        f"llama.rope.scaling.type is {kind!r}: only 'linear' and Llama 3's rope_freqs can be carried over"
    )


def _llama3_scaling(factors: torch.Tensor, config) -> dict:
    """Llama 3's scaling, proven by recomputing the file's `rope_freqs` (each frequency's divisor) from it."""
    plain = LlamaRotaryEmbedding(config).inv_freq
    guesses = {8192, config.max_position_embeddings // round(factors.max().item())}
    for original in sorted(guess for guess in guesses if guess < config.max_position_embeddings):
        scaling = {
            "rope_type": "llama3",
            "factor": factors.max().item(),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        trial = config.__class__(**{**config.to_dict(), "rope_parameters": {**config.rope_parameters, **scaling}})
        if torch.allclose(plain / LlamaRotaryEmbedding(trial).inv_freq, factors, rtol=1e-3):
            return scaling
    raise ValueError("rope_freqs.weight is not Llama 3's RoPE scaling with factors 1 and 4: it cannot be carried over")
