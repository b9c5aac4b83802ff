"""The output folder: who may write there, what a run is, and the finished model."""

import contextlib
import hashlib
import json
import shlex
import shutil
from pathlib import Path

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel
from trl import ModelConfig, SFTConfig

from checkpoints.legal import LEGAL_FILES, legal_files
from checkpoints.outputs import CHECKPOINT_FILES, LOCK_FILE, is_folder, names_of_files, own_files
from checkpoints.resume import NAME
from checkpoints.settings import repair_generation_config
from checkpoints.weights import read_json
from model_cards.render import read_readme

from .arguments import LORA, RECIPE, ChatArguments
from .base import Base, agree_on_tokens, settle_tokenizer
from .chat import Chat
from .trainer import require_finite


RUN_FILE, BEFORE_FILE, RESULTS_FILE = "run.json", "before.json", "results.json"
# The estimator's constants of a run that refreshes them: in each checkpoint and, at the end, in the output folder
CONSTANTS_FILE = "variance_constants.json"
# Tokens of the batch that proves a merge, and the largest error of its logits, relative to the largest of them
PROOF_SHAPE, MERGE_TOLERANCE = (2, 32), 1e-3
SAME_RUN = [*RECIPE, *LORA, "use_peft", "train_norms", "refresh_constants_every", "dtype", "model_revision"]
# What a run leaves that was stopped before its first checkpoint: it may be begun again over it
BEGUN = (RUN_FILE, BEFORE_FILE, "training_log.csv", "training_log.png", LOCK_FILE)
# What runs leave besides checkpoint-N, a card, which is merged, and legal texts, which may be the user's; of a folder whose results list no files
OUTPUTS = (
    *(name for name in CHECKPOINT_FILES if name not in ("README.md", *LEGAL_FILES)),
    *(*BEGUN, RESULTS_FILE, CONSTANTS_FILE, "training_args.bin", "trainer_state.json"),
    *("adapter", "adapter_config.json", "adapter_model.safetensors", ".unfinished", ".unfinished.json", ".finished"),
)
# What a loader would take for a part of the finished model
LOADED = ("*.safetensors", "*.safetensors.index.json", "adapter_config.json", "pytorch_model*.bin")


def check_place(training: SFTConfig, arguments: ChatArguments, base: str):
    """Refuses an output_dir that holds the base, a card that could not be kept, or something else, unless the run goes on
    there or may replace it.

    Raises:
        ValueError: with what to do instead.
    """
    folder = Path(training.output_dir)
    if Path(base).is_dir() and Path(base).resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"output_dir {folder} holds the base, {base}, which the run would replace: choose another")
    read_readme(folder)
    if arguments.overwrite:
        own = own_outputs(folder)
        foreign = sorted(file.name for pattern in LOADED for file in folder.glob(pattern) if file not in own)
        if foreign:
            raise ValueError(
                f"output_dir {folder} holds {foreign[0]} ({len(foreign)} such files), which no run of this command wrote and "
                "which would be loaded with its model: move them away, or choose another folder"
            )
    if training.resume_from_checkpoint or arguments.overwrite or not folder.is_dir():
        return
    if {path.name for path in folder.iterdir()} <= set(BEGUN):
        return
    if (folder / ".unfinished.json").is_file():
        raise ValueError(
            f"output_dir {folder} holds trained weights: `python -m sft finish {shlex.quote(str(folder))}` finishes them, --overwrite trains anew"
        )
    raise ValueError(
        f"output_dir {folder} is not empty: choose another, go on with --resume_from_checkpoint last, or replace it "
        "with --overwrite"
    )


def start_run(training: SFTConfig, arguments: ChatArguments, run: dict):
    """Clears the place of a fresh run and writes down what it is; a run that goes on must be the same one.

    Raises:
        ValueError: what differs from the run that is to go on.
    """
    folder = Path(training.output_dir)
    if training.resume_from_checkpoint:
        check_same_run(folder, run)
        return
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.overwrite:
        remove_outputs(folder)
    save_json(folder / RUN_FILE, run)


def check_same_run(folder: Path, run: dict):
    """Raises ValueError with what differs from the run that was begun in a folder, where it says what that is."""
    if not (folder / RUN_FILE).is_file():
        return
    former = read_json(folder / RUN_FILE)
    if differing := sorted(name for name in run if former.get(name) != run[name]):
        name = differing[0]
        raise ValueError(
            f"{folder} holds another run: its {name} was {former.get(name)!r}, not {run[name]!r}; give what it was "
            "begun with, or choose another output_dir"
        )


def own_outputs(folder: Path) -> set[Path]:
    """The files that earlier runs left in a folder; none in one without a record of ours."""
    own = own_files(folder, OUTPUTS) if folder.is_dir() else None
    if own is None:
        return set()
    steps = (path for path in folder.glob("checkpoint-*") if NAME.fullmatch(path.name))
    kept = {folder / "README.md", folder / LOCK_FILE}
    return ({folder / file for file in own} | {f for step in steps for f in step.rglob("*") if f.is_file()}) - kept


def remove_outputs(folder: Path):
    """Removes what earlier runs left, and the folders that are empty then; a card stays, to be merged."""
    own = own_outputs(folder)
    for file in own:
        file.unlink()
    for place in sorted({place for file in own for place in file.parents if folder in place.parents}, reverse=True):
        with contextlib.suppress(OSError):
            place.rmdir()


def describe_run(
    arguments: ChatArguments, training: SFTConfig, model_arguments: ModelConfig, base: Base, rows: Dataset
) -> dict:
    """What makes a run the same run: its base, its data and the settings that shape the optimisation."""
    digest = hashlib.sha256(json.dumps(list(rows), sort_keys=True).encode()).hexdigest()
    given = vars(arguments) | vars(model_arguments) | vars(training)
    settings = {name: given[name] for name in SAME_RUN}
    return {"base": base.name, "data_sha256": digest, **json.loads(json.dumps(settings, default=str))}


def save_json(file: Path, content: dict, ensure_ascii: bool = False):
    partial = file.with_suffix(".tmp")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=ensure_ascii) + "\n", encoding="utf-8")
    partial.replace(file)


def read_constants(folder: Path) -> tuple[dict[int, tuple[float, float]], list[dict]]:
    """((r, c) of each layer, every refresh so far) as RefreshConstants left them in a folder."""
    kept = json.loads((folder / CONSTANTS_FILE).read_text(encoding="utf-8"))
    return {int(n): tuple(pair) for n, pair in kept["constants"].items()}, kept["history"]


def save_finished(trained: Path, folder: Path, base: Base, chat: Chat, arguments: ChatArguments) -> list[str]:
    """Makes the folder's model of what the trainer saved in `trained`, which stays: merged, in its dtype, with the chat's
    settings. Returns the names of its files.

    Every file is written beside its place and moved there at the end, config.json last.

    Raises:
        NotFinite: a weight that became infinite or no number when an adapter was merged, or in the dtype to save it in.
        ValueError: a merged model that computes something else.
    """
    staged = folder / ".finished"
    shutil.rmtree(staged, ignore_errors=True)
    try:
        if (trained / "adapter_config.json").is_file() and not arguments.merge_adapter:
            shutil.copytree(trained, staged, ignore=shutil.ignore_patterns("training_args.bin", "README.md"))
        else:
            _finished_model(trained, folder, base, chat, arguments.save_dtype).save_pretrained(str(staged))
        settle_tokenizer(chat)
        chat.save(staged)
        for file in carried_files(base):
            shutil.copy(file, staged)
        names = names_of_files(staged)
        for entry in sorted(staged.iterdir(), key=lambda entry: entry.name == "config.json"):
            if is_folder(entry) and is_folder(folder / entry.name):
                shutil.rmtree(folder / entry.name)
            entry.replace(folder / entry.name)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    return names


def _finished_model(trained: Path, folder: Path, base: Base, chat: Chat, save_dtype: str) -> PreTrainedModel:
    """What was trained as it is to be saved."""
    model = open_finished(trained, base)
    if isinstance(model, PeftModel):
        if (folder / CONSTANTS_FILE).is_file():
            # An adapter's weights do not hold what was refreshed in its base
            constants, _ = read_constants(folder)
            model.get_base_model().set_variance_constants(constants)
        model = merge(model)
    repair_generation_config(base.name, model.generation_config)
    agree_on_tokens(model, chat)
    _cast(model, base, save_dtype)
    require_finite(model.state_dict(), "in the dtype to save it in (save_dtype)")
    return model


def carried_files(base: Base) -> list[Path]:
    """What travels from a base to the finished folder: legal texts, and the report of a graft."""
    reports = (file for file in base.folder.glob("conversion_report.*") if file.is_file())
    return [*legal_files(base.folder), *sorted(reports)]


def written_files(folder: Path, model_files: list[str], is_adapter_kept: bool) -> list[str]:
    """Names of all files of a finished run, checkpoints aside, as its results list them."""
    made = [name for name in (*BEGUN, CONSTANTS_FILE) if name != LOCK_FILE and (folder / name).is_file()]
    adapter = [f"adapter/{name}" for name in names_of_files(folder / ".unfinished")] if is_adapter_kept else []
    return sorted({*model_files, *made, *adapter, RESULTS_FILE, "README.md"} - {"adapter/training_args.bin"})


@torch.no_grad()
def merge(model: PeftModel) -> PreTrainedModel:
    """The model with its adapter merged in, as a file would hold it: proven on a small batch, in fp32.

    Raises:
        NotFinite: a weight that became infinite or no number.
        ValueError: its logits are not the adapter's, to MERGE_TOLERANCE of the largest.
    """
    ids = torch.randint(model.config.vocab_size, PROOF_SHAPE, generator=torch.Generator().manual_seed(0))
    model.eval()
    expected = model(input_ids=ids, use_cache=False).logits
    merged = model.merge_and_unload()
    require_finite(merged.state_dict(), "after the adapter was merged")
    # A saved model is tied again when it is loaded
    merged.tie_weights()
    error = (merged(input_ids=ids, use_cache=False).logits - expected).abs().max() / expected.abs().max()
    if not error <= MERGE_TOLERANCE:
        raise ValueError(
            f"the merged model is not the adapter's: logits differ by {error.item():.1e} of the largest, more than "
            f"{MERGE_TOLERANCE:.0e}; --merge_adapter False saves the adapter alone"
        )
    return merged


def saved_dtype(base: Base, save_dtype: str) -> torch.dtype:
    """The dtype of the finished model: with "auto" the one that most of the base is stored in."""
    return base.stored_dtype if save_dtype == "auto" else getattr(torch, save_dtype)


def _cast(model: PreTrainedModel, base: Base, save_dtype: str):
    """Brings every parameter to the dtype to save it in: with "auto" the one that the base stores it in."""
    kept = base.stored_dtypes if save_dtype == "auto" else {}
    other = saved_dtype(base, save_dtype)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(kept.get(name, other))


def open_finished(folder: Path, base: Base) -> PreTrainedModel | PeftModel:
    """The model of a folder in fp32; an adapter on its base."""
    if (folder / "adapter_config.json").is_file():
        model = AutoModelForCausalLM.from_pretrained(
            base.name, config=base.config, dtype=torch.float32, **base.loading
        )
        return PeftModel.from_pretrained(model, folder)
    code = {"trust_remote_code": base.loading["trust_remote_code"]}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **code)
