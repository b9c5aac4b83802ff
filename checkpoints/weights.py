"""The weights of a checkpoint's folder: which files they are, and each tensor when it is asked for."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor


SINGLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"


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
        # As safetensors writes them: "BF16", "F8_E4M3"
        self.dtypes: dict[str, str] = {}
        for file in files:
            try:
                with safe_open(file, "pt") as opened:
                    self._files |= dict.fromkeys(opened.keys(), file)
                    slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
                    self.shapes |= {name: tensor.get_shape() for name, tensor in slices.items()}
                    self.dtypes |= {name: tensor.get_dtype() for name, tensor in slices.items()}
            except SafetensorError as error:
                raise ValueError(f"{file} is damaged ({error}): complete the download") from error
        self.names = list(self.shapes)

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], "pt") as opened:
            return opened.get_tensor(name)


def weight_names(folder: Path) -> list[str]:
    """Names of the files that hold a folder's weights: what its index names, or the one file; other files never count.

    Raises:
        ValueError: an index that names no files of this folder.
    """
    if (folder / "adapter_config.json").is_file():
        return [ADAPTER]
    # transformers takes the single file where there are both
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return [SINGLE]
    places = read_json(folder / INDEX).get("weight_map")
    names = list(places.values()) if isinstance(places, dict) else []
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ValueError(f"{folder / INDEX} has no weight_map to files of its folder: take another copy of it")
    return sorted(set(names))


def weight_files(folder: Path) -> list[Path]:
    """The files that `weight_names` names.

    Raises:
        ValueError: one of them is absent.
    """
    names = weight_names(folder)
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
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds no JSON object")
    return values
