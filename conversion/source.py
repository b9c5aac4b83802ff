"""Reads a plain Llama checkpoint: a folder of safetensors, a GGUF file or a Hub id. Refuses what it cannot carry over."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from huggingface_hub import ModelCard, snapshot_download
from rich.progress import track
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase
from yaml import YAMLError

from .calibration import NORM_OF_SITE
from .gguf_source import read_gguf


NORM_SUFFIXES = tuple(f".{name}.weight" for name in NORM_OF_SITE.values())
HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.jinja", "*.txt", "README.md"]
# Written by old versions of transformers, recomputed from the configuration since
RECOMPUTED_SUFFIX = ".self_attn.rotary_emb.inv_freq"


@dataclass
class Source:
    """A plain Llama checkpoint, checked but not yet in memory: `tensors` yields each tensor as it is stored."""

    name: str
    config: LlamaConfig
    tensors: Mapping[str, Tensor]
    tokenizer: PreTrainedTokenizerBase
    generation_config: GenerationConfig | None
    open_model: Callable[[], LlamaForCausalLM]
    files: dict[str, dict]
    quantization: str | None = None
    license: str | None = None
    recomputed: list[str] = field(default_factory=list)

    @cached_property
    def model(self) -> LlamaForCausalLM:
        """The source in memory, in its own dtype; opened when it is first asked for."""
        return self.open_model().eval()

    @property
    def norm_names(self) -> list[str]:
        return [name for name in self.tensors if name.endswith(NORM_SUFFIXES)]

    def count_tensors(self) -> dict:
        """Where each tensor of the source goes: copied, replaced, or left out (named, with the reason)."""
        tied_head = self.config.tie_word_embeddings and "lm_head.weight" in self.tensors
        left_out = [f"{name} (recomputed from the configuration)" for name in self.recomputed]
        left_out += ["lm_head.weight (equal to the tied embeddings)"] * tied_head
        replaced = len(self.norm_names)
        return {"copied": len(self.tensors) - replaced - len(left_out), "replaced": replaced, "left_out": left_out}

    @property
    def hub_id(self) -> str | None:
        return None if Path(self.name).exists() else self.name


class StoredTensors(Mapping):
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

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], "pt") as opened:
            return opened.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def read_source(name: str) -> Source:
    """Opens the checkpoint and checks it whole.

    Raises:
        ValueError: not a plain Llama checkpoint, or one whose files and configuration contradict each other.
    """
    path = Path(name)
    if path.suffix == ".gguf":
        source = _read_gguf_source(name, path)
    else:
        source = _read_folder(name, path if path.is_dir() else _download(name))
    if source.generation_config is not None:
        try:
            source.generation_config.validate(strict=True)
        except ValueError as error:
            reason = str(error).replace("\n", " ")
            raise ValueError(
                f"{name}: generation_config.json would not be saved again; mend it first: {reason}"
            ) from error
    _make_portable(source.tokenizer, source.config)
    return source


def _read_gguf_source(name: str, path: Path) -> Source:
    if not path.is_file():
        raise ValueError(f"no GGUF file at {name}")
    model, tokenizer, values, quantization = read_gguf(path)
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    return Source(
        name,
        model.config,
        tensors,
        tokenizer,
        model.generation_config,
        open_model=lambda: model,
        files=_describe([path]),
        quantization=quantization,
        license=values.get("general.license"),
    )


def _read_folder(name: str, folder: Path) -> Source:
    stated, config = _read_llama_config(folder)
    files = _weight_files(folder)
    tensors = StoredTensors(files)
    recomputed = [key for key in tensors if key.endswith(RECOMPUTED_SUFFIX)]
    _settle_tie(config, tensors, is_stated="tie_word_embeddings" in stated)
    _check_tensors(config, {name: shape for name, shape in tensors.shapes.items() if name not in recomputed})
    _check_tied_head(config, tensors)
    has_generation_config = (folder / "generation_config.json").is_file()
    return Source(
        name,
        config,
        tensors,
        AutoTokenizer.from_pretrained(folder),
        GenerationConfig.from_pretrained(folder) if has_generation_config else None,
        open_model=lambda: LlamaForCausalLM.from_pretrained(folder, config=config, dtype="auto"),
        files=_describe(files),
        license=_license(folder / "README.md"),
        recomputed=recomputed,
    )


def _license(card: Path) -> str | None:
    if not card.is_file():
        return None
    try:
        return ModelCard.load(card).data.license
    except (ValueError, YAMLError):
        return None


def _download(repository: str) -> Path:
    if repository.count("/") > 1 or repository.startswith((".", "/")):
        raise ValueError(f"no folder at {repository}: give a folder, a .gguf file or a Hub id")
    try:
        return Path(snapshot_download(repository, allow_patterns=HUB_FILES))
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{repository} is no folder here and could not be read from the Hub: {reason}") from error


def _read_llama_config(folder: Path) -> tuple[dict, LlamaConfig]:
    """config.json as it stands, and as transformers reads it."""
    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"{folder} holds an adapter: merge it into its base model first (PEFT: merge_and_unload)")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: give the folder of a Llama checkpoint")
    values = _read_json(folder / "config.json")
    model_type = values.get("model_type")
    if model_type == "bhyt_llama":
        raise ValueError(f"{folder} is a BHyT checkpoint already")
    if model_type != "llama":
        raise ValueError(f"{folder} has model_type {model_type!r}: only 'llama' checkpoints can be grafted")
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"{folder} is quantised ({method}): dequantise it, or start from the original checkpoint")
    return values, LlamaConfig.from_pretrained(folder)


def _read_json(file: Path) -> dict:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds no JSON object")
    return values


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    # transformers takes the single file where there are both
    if index.is_file() and not (folder / "model.safetensors").is_file():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
    else:
        names = ["model.safetensors"]
    if missing := [name for name in names if not (folder / name).is_file()]:
        pickles = sorted(folder.glob("*.bin"))
        hint = "; save its pickle as safetensors first" if pickles else ": complete the download"
        raise ValueError(
            f"{folder} lacks {', '.join(missing[:3])} ({len(missing)} of {len(names)} weight files){hint}"
        )
    return [folder / name for name in names]


def _settle_tie(config: LlamaConfig, tensors: StoredTensors, is_stated: bool):
    """Checks that configuration and file agree on the tie of head and embeddings; an unstated tie is read off the file."""
    has_head = "lm_head.weight" in tensors
    if not is_stated:
        config.tie_word_embeddings = not has_head
    elif not config.tie_word_embeddings and not has_head:
        raise ValueError(
            "config.json says tie_word_embeddings = false, but the file holds no lm_head.weight: "
            "set tie_word_embeddings to true, or complete the checkpoint"
        )


def _check_tied_head(config: LlamaConfig, tensors: StoredTensors):
    has_head = config.tie_word_embeddings and "lm_head.weight" in tensors
    if has_head and not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
        raise ValueError(
            "config.json says tie_word_embeddings = true, but the file holds an lm_head.weight that differs from "
            "model.embed_tokens.weight: set tie_word_embeddings to false, or remove lm_head.weight"
        )


def _check_tensors(config: LlamaConfig, shapes: dict[str, list[int]]):
    """Every tensor of the file must have a place of its shape in the model, and every place a tensor."""
    with torch.device("meta"):
        places = {name: list(tensor.shape) for name, tensor in LlamaForCausalLM(config).state_dict().items()}
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


def _make_portable(tokenizer: PreTrainedTokenizerBase, config: LlamaConfig):
    """A finite model_max_length, and no trace of where the files lay."""
    tokenizer.model_max_length = min(tokenizer.model_max_length, config.max_position_embeddings)
    for leftover in ("is_local", "local_files_only", "name_or_path", "gguf_file"):
        tokenizer.init_kwargs.pop(leftover, None)
    config.__dict__.pop("_model_name_or_path", None)


def _describe(files: list[Path]) -> dict[str, dict]:
    described = {}
    for file in track(files, description="reading the source"):
        digest = hashlib.sha256()
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                digest.update(chunk)
        described[file.name] = {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}
    return described
