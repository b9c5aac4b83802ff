"""The checkpoint that a run starts from: its settings put right, its model ready to train."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from accelerate.state import PartialState
from huggingface_hub import snapshot_download
from peft import LoraConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from trl import ModelConfig, SFTConfig, get_peft_config, get_quantization_config

import modeling_bhyt  # noqa: F401
from checkpoints.legal import LEGAL_FILES
from checkpoints.names import names_a_folder
from checkpoints.settings import read_config, read_tokenizer, repair_generation_config, settle_vocabulary
from checkpoints.weights import StoredTensors, weight_names

from .chat import Chat


# Legal texts travel with what is made of a checkpoint, and so does the report of a graft
CARRIED_OVER = [*LEGAL_FILES, "conversion_report.*", "README.md"]
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CONSTANTS = ("variance_ratio", "variance_offset")
GROUPS = {
    "LoRA": ("lora_",),
    "estimator constants": CONSTANTS,
    "lambda": ("layernorm.lam", ".norm.lam", ".default.lam"),
    "norm gains": ("norm.weight", "norm.modules_to_save.default.weight", "norm.bias", "norm.alpha"),
    "attention": ("self_attn.",),
    "MLP": ("mlp.",),
    "embeddings": ("embed_tokens.", "embed_norm."),
    "head": ("lm_head.",),
}


@dataclass
class Base:
    """A checkpoint by name; `notes` says in sentences what was put right in its settings."""

    name: str
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    loading: dict
    notes: list[str] = field(default_factory=list)
    licence: dict[str, str | None] = field(default_factory=dict)

    @property
    def stored_dtype(self) -> torch.dtype:
        return self.config.dtype or torch.float32

    @property
    def published_name(self) -> str:
        """The Hub id, or the last part of a folder's name: paths of one machine are nobody else's business."""
        return Path(self.name).resolve().name if Path(self.name).is_dir() else self.name

    @cached_property
    def folder(self) -> Path:
        """Where the checkpoint's small files are."""
        if Path(self.name).is_dir():
            return Path(self.name)
        return Path(snapshot_download(self.name, revision=self.loading["revision"], allow_patterns=CARRIED_OVER))

    @property
    def fingerprint(self) -> list:
        """What tells this checkpoint from another of the same name: its revision, or its files' sizes and times."""
        if not Path(self.name).is_dir():
            return [self.name, self.loading["revision"]]
        files = [*self._weight_files(), self.folder / "config.json"]
        return [self.name, *((file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files)]

    @cached_property
    def stored_dtypes(self) -> dict[str, torch.dtype]:
        """dtype of each tensor as the base stores it. To be asked after the weights were loaded, and so fetched."""
        stored = StoredTensors(self._weight_files()).dtypes
        return {name: DTYPES[dtype] for name, dtype in stored.items() if dtype in DTYPES}

    def _weight_files(self) -> list[Path]:
        """The files with the base's weights; none where they are pickles. Whatever else lies in the folder is no part."""
        return [file for name in weight_names(self.folder) if (file := self.folder / name).is_file()]

    @cached_property
    def conversion(self) -> dict | None:
        """What the conversion report of a graft says in short; None for any other base."""
        file = self.folder / "conversion_report.json"
        if not file.is_file():
            return None
        try:
            report = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            self.notes.append("the base's conversion_report.json cannot be read: its figures are left out")
            return None
        kept = (
            "command",
            "source",
            "perplexity",
            "kl_nats_per_token",
            "verdict",
            "exact_layers",
            "healing",
            "settings",
        )
        return {name: report.get(name) for name in kept}


def read_base(model: ModelConfig, training: SFTConfig) -> Base:
    """Configuration and tokenizer, nothing large yet.

    Raises:
        ValueError, OSError: no checkpoint, one that has to be made first, or a vocabulary that contradicts itself.
    """
    name = model.model_name_or_path
    assert name is not None
    if name.endswith(".gguf"):
        raise ValueError(
            f"{name} is a GGUF file, which cannot be trained on: make a checkpoint of it, as by `python -m conversion graft`"
        )
    if not Path(name).exists() and names_a_folder(name):
        raise ValueError(f"no folder at {name}: name a checkpoint's folder or a Hub id")
    if (Path(name) / "adapter_config.json").is_file():
        raise ValueError(f"{name} is an adapter: merge it first (merge_and_unload), and train what comes of it")
    loading = {
        "revision": model.model_revision,
        "trust_remote_code": training.trust_remote_code,
    }
    config = read_config(name, **loading)
    tokenizer = read_tokenizer(name, **loading)
    notes = settle_vocabulary(name, config, tokenizer)
    if tokenizer.pad_token is None:
        notes.append("the tokenizer has no padding token: the end of a turn pads too, masked everywhere")
    if model.attn_implementation:
        loading["attn_implementation"] = model.attn_implementation
    base = Base(name, config, tokenizer, loading, notes)
    # Asked now, so that the summary says what cannot be read
    _ = base.conversion
    return base


def load_model(base: Base, chat: Chat, arguments: ModelConfig) -> PreTrainedModel:
    """The model, in `arguments.dtype` (float32 unless told otherwise), agreeing with the chat on stop and padding ids."""
    quantization = get_quantization_config(arguments)
    placement = (
        {"quantization_config": quantization, "device_map": {"": PartialState().device}} if quantization else {}
    )
    dtype = base.stored_dtype if arguments.dtype in ("auto", None) else getattr(torch, arguments.dtype)
    model = AutoModelForCausalLM.from_pretrained(
        base.name, config=base.config, dtype=dtype, **placement, **base.loading
    )
    base.notes += repair_generation_config(base.name, model.generation_config)
    agree_on_tokens(model, chat)
    # Padding is masked. A row of the embeddings that pads and means something else too still has to learn
    model.get_input_embeddings().padding_idx = None
    return model


def agree_on_tokens(model: PreTrainedModel, chat: Chat):
    """Tokenizer, configuration and generation settings get the same stop ids (the end of a turn first) and padding."""
    settle_tokenizer(chat)
    stops = chat.stop_ids(model.generation_config.eos_token_id or model.config.eos_token_id)
    for settings in (model.config, model.generation_config):
        settings.eos_token_id = stops
        settings.pad_token_id = chat.tokenizer.pad_token_id


def settle_tokenizer(chat: Chat):
    """The end of a turn ends a text, and pads where nothing else does."""
    chat.tokenizer.eos_token = chat.stop_token
    chat.tokenizer.pad_token = chat.tokenizer.pad_token or chat.stop_token


def adapter_config(arguments: ModelConfig, model: PreTrainedModel, train_norms: bool) -> LoraConfig | None:
    """LoRA on every projection but the head, or where the user says; None without LoRA."""
    config = get_peft_config(arguments)
    if config is None:
        return None
    names = {name.rsplit(".", 1)[-1] for name, _ in model.named_modules()}
    if config.target_modules in names:
        # TRL makes a text of a list of one, which PEFT takes for a pattern of whole paths
        config.target_modules = {config.target_modules}
    if train_norms:
        config.modules_to_save = sorted(name for name in names if name.endswith("layernorm"))
    return config


def check_ties(model: torch.nn.Module, targets: str | list[str] | None):
    """Refuses adapters on embeddings or head where both are one tensor: merged, a change of one would be a change of both.

    Raises:
        ValueError: which module, and what to do instead.
    """
    if not isinstance(model, PeftModel):
        return
    plain = model.get_base_model()
    ends = {"embeddings": plain.get_input_embeddings(), "head": plain.get_output_embeddings()}
    adapted = [name for name, end in ends.items() if isinstance(end, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    if adapted and plain.config.tie_word_embeddings:
        raise ValueError(
            f"lora_target_modules {targets!r} adapts the {adapted[0]}, but embeddings and head of this base are one tensor "
            "(tie_word_embeddings), which no merge could change at one end alone: leave embed_tokens and lm_head out of it"
        )


def freeze_constants(model: torch.nn.Module):
    """r and c, which PEFT's modules_to_save sets free with the norms around them, stay constants of the checkpoint."""
    if getattr(model.config, "learnable_variance", True):
        return
    for name, parameter in model.named_parameters():
        if name.endswith(CONSTANTS):
            parameter.requires_grad_(False)


def trainable_parameters(model: torch.nn.Module) -> dict[str, int]:
    """How many numbers of each group are trained; groups without any are left out."""
    counts = dict.fromkeys([*GROUPS, "others"], 0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = next((group for group, parts in GROUPS.items() if any(part in name for part in parts)), "others")
            counts[group] += parameter.numel()
    return {group: count for group, count in counts.items() if count}
