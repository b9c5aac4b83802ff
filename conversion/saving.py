"""Writes checkpoints: whole or not at all, one weight file at a time."""

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.progress import track
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from model_cards.render import read_readme

from .arguments import AUTO, OutputArguments
from .source import Source


def check_place(arguments: OutputArguments, num_bytes: int):
    """Refuses an OUTPUT that exists, holds a card that could not be kept, cannot be written or does not fit on the disk, and a
    shard size that is none.

    Raises:
        ValueError: with what to do instead.
    """
    output = Path(arguments.output)
    if arguments.max_shard_size != AUTO:
        parse_size(arguments.max_shard_size)
    if output.exists() and not arguments.overwrite:
        raise ValueError(f"OUTPUT {output} exists: choose another folder, or replace it with --overwrite")
    read_readme(output)
    place = next(folder for folder in output.absolute().parents if folder.exists())
    if not os.access(place, os.W_OK):
        raise ValueError(f"OUTPUT {output} cannot be made: {place} is not writable")
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise ValueError(
            f"OUTPUT {output} needs {num_bytes / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free on its disk: make room, or choose another disk"
        )


@contextmanager
def save_whole(output: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside `output` that takes its place when the block ends, and vanishes where it fails."""
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        fresh = staging / "new"
        fresh.mkdir()
        yield fresh
        if output.exists():
            if not overwrite:
                raise ValueError(f"OUTPUT {output} appeared meanwhile: choose another folder, or add --overwrite")
            output.rename(staging / "old")
        try:
            fresh.rename(output)
        except BaseException:
            if (staging / "old").exists():
                (staging / "old").rename(output)
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)


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
