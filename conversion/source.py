"""Reads a plain Llama checkpoint: a folder of safetensors, a GGUF file or a Hub id. Refuses what it cannot carry over."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from rich.progress import track
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from checkpoints.legal import LEGAL_FILES, legal_files
from checkpoints.names import names_a_folder
from checkpoints.settings import read_tokenizer, repair_generation_config, settle_vocabulary, unsaveable
from checkpoints.weights import INDEX, SINGLE, StoredTensors, read_json, weight_files, weight_names
from model_cards.licence import read_licence
from model_cards.render import LICENCE
from modeling_bhyt import BHyTLlamaConfig, BHyTLlamaForCausalLM

from .calibration import NORM_OF_SITE
from .families import as_llama, llama_config
from .gguf_source import read_gguf
from .lookalikes import unread_fields
from .source_checks import check_finite, check_numbers, check_tensors, check_tied_head, settle_tie
from .tensors import WithZeroOutputBias


NORM_SUFFIXES = tuple(f".{name}.weight" for name in NORM_OF_SITE.values())
# What a repository has beside its weights
HUB_FILES = ["*.json", "*.model", "*.jinja", "*.txt", "README.md", *LEGAL_FILES]
# Written by old versions of transformers, recomputed from the configuration since
RECOMPUTED_SUFFIX = ".self_attn.rotary_emb.inv_freq"


@dataclass
class Source:
    """A checkpoint with Llama's block, checked but not yet in memory: `tensors` yields each tensor as it is stored.

    `config` is Llama's, whatever the family; `notes` says in sentences what was put right in the source's settings,
    `unread` names fields of its config.json that the model does not read.
    """

    name: str
    config: LlamaConfig
    tensors: Mapping[str, Tensor]
    tokenizer: PreTrainedTokenizerBase
    generation_config: GenerationConfig | None
    open_model: Callable[[], PreTrainedModel]
    files: dict[str, dict]
    quantization: str | None = None
    licence: dict[str, str | None] = field(default_factory=dict)
    legal_files: list[Path] = field(default_factory=list)
    recomputed: list[str] = field(default_factory=list)
    placement: dict = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    @cached_property
    def model(self) -> PreTrainedModel:
        """The source in memory, in its own dtype; opened when it is first asked for, placed as `placement` says."""
        model = self.open_model(**self.placement).eval()
        if model.dtype == torch.float16:
            for part in (model, model.base_model):
                part.register_forward_hook(_refuse_overflow)
        return model

    @property
    def norm_names(self) -> list[str]:
        return [name for name in self.tensors if name.endswith(NORM_SUFFIXES)]

    def left_out(self) -> dict[str, str]:
        """Tensors that have no place in the result, each with the reason."""
        reasons = dict.fromkeys(self.recomputed, "recomputed from the configuration")
        if self.config.tie_word_embeddings and "lm_head.weight" in self.tensors:
            reasons["lm_head.weight"] = "equal to the tied embeddings"
        return reasons

    def kept_names(self) -> list[str]:
        """Tensors that neither a norm replaces nor anything leaves out."""
        gone = {*self.norm_names, *self.left_out()}
        return [name for name in self.tensors if name not in gone]

    @property
    def num_bytes(self) -> int:
        return sum(file["bytes"] for file in self.files.values())

    @property
    def hub_id(self) -> str | None:
        return None if Path(self.name).exists() else self.name


def _refuse_overflow(module, arguments, output):
    if not output[0].isfinite().all():
        raise ValueError(
            "the source's own products overflow in float16, whatever the dtype to save: write it in bfloat16 first, by "
            "AutoModelForCausalLM.from_pretrained(SOURCE, dtype='bfloat16').save_pretrained(FOLDER), with its tokenizer, and "
            "graft that"
        )


def read_source(name: str, placement: dict | None = None) -> Source:
    """Opens the checkpoint and checks it whole. `placement` (device_map, max_memory) says where its model will stand.

    Raises:
        ValueError: not a plain Llama checkpoint, or one whose files and configuration contradict each other.
    """
    path = Path(name)
    if path.suffix == ".gguf":
        source = _read_gguf_source(name, path)
    else:
        source = _read_folder(name, path if path.is_dir() else _download(name))
    source.placement = placement or {}
    if source.generation_config is not None:
        source.notes += repair_generation_config(name, source.generation_config)
    _make_portable(source.tokenizer, source.config)
    return source


def read_bhyt(name: str, placement: dict | None = None) -> Source:
    """Opens a BHyT checkpoint of a folder, to be healed or exported.

    Raises:
        ValueError: no such checkpoint.
    """
    folder = Path(name)
    stated = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if stated.get("model_type") != BHyTLlamaConfig.model_type:
        raise ValueError(f"{name} is no folder of a BHyT checkpoint: `python -m conversion graft` makes one")
    config, files = BHyTLlamaConfig.from_pretrained(folder), weight_files(folder)
    tokenizer = read_tokenizer(folder)
    _make_portable(tokenizer, config)
    return Source(
        name,
        config,
        StoredTensors(files),
        tokenizer,
        _generation_config(folder),
        open_model=lambda **placement: BHyTLlamaForCausalLM.from_pretrained(folder, dtype="auto", **placement),
        files=_describe(files),
        licence=read_licence(folder),
        legal_files=legal_files(folder),
        placement=placement or {},
    )


def _read_gguf_source(name: str, path: Path) -> Source:
    if not path.is_file():
        raise ValueError(f"no GGUF file at {name}")
    model, tokenizer, values, quantization = read_gguf(path)
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    check_finite(tensors)
    notes = settle_vocabulary(name, model.config, tokenizer)
    config = as_llama(model.config)
    return Source(
        name,
        config,
        _as_llamas(tensors, config, model.config),
        tokenizer,
        model.generation_config,
        open_model=lambda **placement: model,
        files=_describe([path]),
        quantization=quantization,
        licence={key: values.get(f"general.{key.replace('_', '.')}") for key in LICENCE},
        notes=notes,
    )


def _read_folder(name: str, folder: Path) -> Source:
    stated, config, own_config = _read_config(folder)
    files = weight_files(folder)
    tokenizer = read_tokenizer(folder)
    notes = settle_vocabulary(name, own_config, tokenizer)
    config.pad_token_id = own_config.pad_token_id
    stored = StoredTensors(files)
    check_numbers(config, stored)
    tensors = _as_llamas(stored, config, own_config)
    recomputed = [key for key in tensors if key.endswith(RECOMPUTED_SUFFIX)]
    settle_tie(config, tensors, is_stated="tie_word_embeddings" in stated)
    own_config.tie_word_embeddings = config.tie_word_embeddings
    check_tensors(own_config, {name: shape for name, shape in stored.shapes.items() if name not in recomputed})
    check_tied_head(config, tensors)
    check_finite(tensors)
    return Source(
        name,
        config,
        tensors,
        tokenizer,
        _generation_config(folder),
        open_model=lambda **placement: AutoModelForCausalLM.from_pretrained(
            folder, config=own_config, dtype="auto", **placement
        ),
        files=_describe(files),
        licence=read_licence(folder),
        legal_files=legal_files(folder),
        recomputed=recomputed,
        notes=notes,
        unread=unread_fields(stated, own_config),
    )


def _generation_config(folder: Path) -> GenerationConfig | None:
    if not (folder / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder)
    except (ValueError, TypeError, AttributeError) as error:
        raise unsaveable(folder, error) from error


def _download(repository: str) -> Path:
    if names_a_folder(repository):
        raise ValueError(f"no folder at {repository}: give a folder, a .gguf file or a Hub id")
    try:
        folder = Path(snapshot_download(repository, allow_patterns=[*HUB_FILES, SINGLE]))
        # The index says which of a repository's files are the model: all others stay there. The same commit for both
        if not (folder / SINGLE).is_file() and (folder / INDEX).is_file():
            snapshot_download(repository, revision=folder.name, allow_patterns=weight_names(folder))
        return folder
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{repository} is no folder here and could not be read from the Hub: {reason}") from error


def _read_config(folder: Path) -> tuple[dict, LlamaConfig, PretrainedConfig]:
    """config.json as it stands, as Llama's configuration, and as its own family's."""
    if (folder / "adapter_config.json").is_file():
        raise ValueError(f"{folder} holds an adapter: merge it into its base model first (PEFT: merge_and_unload)")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json: give the folder of a Llama checkpoint")
    values = read_json(folder / "config.json")
    if values.get("quantization_config"):
        stated = values["quantization_config"]
        method = stated.get("quant_method", "unknown") if isinstance(stated, dict) else stated
        raise ValueError(f"{folder} is quantised ({method}): dequantise it, or start from the original checkpoint")
    return values, *llama_config(values, folder)


def _as_llamas(tensors: Mapping[str, Tensor], config: LlamaConfig, own: PretrainedConfig) -> Mapping[str, Tensor]:
    return WithZeroOutputBias(tensors, config) if own.model_type == "qwen2" else tensors


def _make_portable(tokenizer: PreTrainedTokenizerBase, config: LlamaConfig):
    """A finite model_max_length, and no trace of where the files lay."""
    stated = tokenizer.model_max_length
    if isinstance(stated, bool) or not isinstance(stated, (int, float)):
        raise ValueError(f"tokenizer_config.json says model_max_length = {stated!r}: give a number of tokens")
    tokenizer.model_max_length = min(stated, config.max_position_embeddings)
    for leftover in ("is_local", "local_files_only", "name_or_path", "gguf_file"):
        tokenizer.init_kwargs.pop(leftover, None)
    for leftover in ("_name_or_path", "_model_name_or_path"):
        config.__dict__.pop(leftover, None)


def _describe(files: list[Path]) -> dict[str, dict]:
    described = {}
    for file in track(files, description="reading the source"):
        digest = hashlib.sha256()
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                digest.update(chunk)
        described[file.name] = {"bytes": file.stat().st_size, "sha256": digest.hexdigest()}
    return described
