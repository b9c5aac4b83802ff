"""A checkpoint's tensors by name, each made when it is asked for."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import LlamaConfig


def output_dtype(stored: torch.dtype, requested: str) -> torch.dtype:
    return stored if requested == "auto" else getattr(torch, requested)


class LazyTensors(Mapping):
    """Tensors by name, each made when it is asked for; `names` alone says which there are."""

    names: list[str]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


class StoredTensors(LazyTensors):
    """The tensors of safetensors files by name, each read when it is asked for."""

    def __init__(self, files: list[Path]):
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, list[int]] = {}
        for file in files:
            try:
                with safe_open(file, "pt") as opened:
                    self._files |= dict.fromkeys(opened.keys(), file)
                    self.shapes |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
            except SafetensorError as error:
                raise ValueError(f"{file} is damaged ({error}): complete the download") from error
        self.names = list(self.shapes)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], "pt") as opened:
            return opened.get_tensor(name)


class WithZeroOutputBias(StoredTensors):
    """Qwen2's tensors as Llama's: the o projection, which has no bias there, gets one of 0."""

    def __init__(self, files: list[Path], config: LlamaConfig):
        super().__init__(files)
        self._zeros = [f"model.layers.{layer}.self_attn.o_proj.bias" for layer in range(config.num_hidden_layers)]
        self.shapes |= {name: [config.hidden_size] for name in self._zeros}
        self.names += self._zeros

    def __getitem__(self, name: str) -> Tensor:
        if name in self._zeros:
            return torch.zeros(self.shapes[name], dtype=self["model.norm.weight"].dtype)
        return super().__getitem__(name)


def weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    # transformers takes the single file where there are both
    if index.is_file() and not (folder / "model.safetensors").is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
    else:
        names = ["model.safetensors"]
    if missing := [name for name in names if not (folder / name).is_file()]:
        pickles = sorted(folder.glob("*.bin"))
        hint = "; save its pickle as safetensors first" if pickles else ": complete the download"
        raise ValueError(
            f"{folder} lacks {', '.join(missing[:3])} ({len(missing)} of {len(names)} weight files){hint}"
        )
    return [folder / name for name in names]


def read_json(file: Path) -> dict:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds no JSON object")
    return values
