"""Writes checkpoints, one weight file at a time."""

import json
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from .arguments import AUTO, OutputArguments
from .source import Source


def save_checkpoint(
    folder: Path,
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    tensors: Mapping[str, Tensor],
    source: Source,
    max_bytes: float,
):
    """Weights, configuration, code, tokenizer, chat template, generation settings and legal texts.

    One weight file of up to `max_bytes` at a time is in memory.
    """
    save_tensors(folder, tensors, max_bytes)
    config.architectures = [model_class.__name__]
    config.dtype = tensors["model.embed_tokens.weight"].dtype
    config.save_pretrained(folder)
    if model_class._auto_class is not None:
        custom_object_save(model_class, folder, config=config)
    if source.generation_config is not None:
        source.generation_config.save_pretrained(folder)
    source.tokenizer.save_pretrained(folder)
    for file in source.legal_files:
        shutil.copy(file, folder / file.name)


def shard_bytes(arguments: OutputArguments, source: Source) -> float:
    """Bytes of a weight file at most: what was asked for, or as the source does it."""
    if arguments.max_shard_size != AUTO:
        return parse_size(arguments.max_shard_size)
    sizes = [file["bytes"] for file in source.files.values()]
    return max(sizes) if len(sizes) > 1 else math.inf


def parse_size(words: str) -> int:
    """Bytes of "500MB" or "5GB".

    Raises:
        ValueError: anything else.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)B", words.strip(), re.IGNORECASE)
    if match is None:
        raise ValueError(f"max_shard_size is {words!r}: give auto, or a size such as 500MB or 5GB")
    return int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " "))


def save_tensors(folder: Path, tensors: Mapping[str, Tensor], max_bytes: float):
    """`tensors` as safetensors, in files of up to `max_bytes`: gathered, written and let go one after another."""
    parts: list[list[str]] = []
    pending: dict[str, Tensor] = {}

    def write():
        save_file(pending, folder / f"part-{len(parts)}", metadata={"format": "pt"})
        parts.append(list(pending))
        pending.clear()

    total = 0
    for name in track(tensors, description="saving"):
        tensor = tensors[name].contiguous()
        if pending and tensor.nbytes + sum(other.nbytes for other in pending.values()) > max_bytes:
            write()
        pending[name] = tensor
        total += tensor.nbytes
    write()
    if len(parts) == 1:
        (folder / "part-0").rename(folder / "model.safetensors")
        return
    files = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in range(1, len(parts) + 1)]
    for number, file in enumerate(files):
        (folder / f"part-{number}").rename(folder / file)
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, names in zip(files, parts) for name in names},
    }
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
