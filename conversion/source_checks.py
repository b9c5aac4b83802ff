"""Whether the tensors of a source are what its configuration says: asked before anything is computed."""

from collections.abc import Mapping

import torch
from rich.progress import track
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig

from checkpoints.weights import StoredTensors


# Of the numbers that safetensors knows; the others (fp8, int8, ...) mean something with a scale that stands elsewhere
WEIGHT_DTYPES = ("F64", "F32", "F16", "BF16")


def settle_tie(config: LlamaConfig, tensors: Mapping[str, Tensor], is_stated: bool):
    """Checks that configuration and file agree on the tie of head and embeddings; an unstated tie is read off the file."""
    has_head = "lm_head.weight" in tensors
    if not is_stated:
        config.tie_word_embeddings = not has_head
    elif not config.tie_word_embeddings and not has_head:
        raise ValueError(
            "config.json says tie_word_embeddings = false, but the file holds no lm_head.weight: "
            "set tie_word_embeddings to true, or complete the checkpoint"
        )


def check_tied_head(config: LlamaConfig, tensors: Mapping[str, Tensor]):
    has_head = config.tie_word_embeddings and "lm_head.weight" in tensors
    if has_head and not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
        raise ValueError(
            "config.json says tie_word_embeddings = true, but the file holds an lm_head.weight that differs from "
            "model.embed_tokens.weight: set tie_word_embeddings to false, or remove lm_head.weight"
        )


def check_numbers(config: LlamaConfig, tensors: StoredTensors):
    """What has to hold before a model of this configuration is laid out: as many layers, and numbers with a meaning."""
    for name, dtype in tensors.dtypes.items():
        if dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"{name} is stored as {dtype}: only {', '.join(WEIGHT_DTYPES)} can be grafted; dequantise the checkpoint, or "
                "start from the original one"
            )
    layers = {part for name in tensors if (part := name.removeprefix("model.layers.")) != name}
    num_layers = len({part.split(".", 1)[0] for part in layers})
    if config.num_hidden_layers != num_layers:
        raise ValueError(
            f"config.json says num_hidden_layers = {config.num_hidden_layers}, but the file holds {num_layers}"
        )


def check_tensors(config: PretrainedConfig, shapes: dict[str, list[int]]):
    """Every tensor of the file must have a place of its shape in the model, and every place a tensor."""
    try:
        with torch.device("meta"):
            places = {
                name: list(tensor.shape)
                for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items()
            }
    # Whatever an impossible value meets first
    except Exception as error:
        raise ValueError(f"config.json describes no model ({type(error).__name__}: {error}): mend it") from error
    names, expected = set(shapes), set(places)
    optional = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for problem, keys in (("unexpected", names - expected), ("missing", expected - names - optional)):
        if keys:
            shown = ", ".join(sorted(keys)[:4]) + (f" and {len(keys) - 4} more" if len(keys) > 4 else "")
            hint = "; are attention_bias and mlp_bias set as they should?" if any(".bias" in k for k in keys) else ""
            raise ValueError(f"{len(keys)} {problem} tensors for this config.json: {shown}{hint}")
    for name, shape in shapes.items():
        if shape != places[name]:
            raise ValueError(f"{name} has shape {shape}, but config.json makes it {places[name]}")


def check_finite(tensors: Mapping[str, Tensor]):
    for name in track(tensors, description="checking the source"):
        if not tensors[name].isfinite().all():
            raise ValueError(f"{name} holds NaN or infinity: the source is broken, take another copy of it")
