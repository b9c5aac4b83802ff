"""The weights of a checkpoint's folder: which files they are, and each tensor when it is asked for."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor


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
