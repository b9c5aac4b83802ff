"""The output folder: who may write there, what a run is, and the finished model."""

import hashlib
import json
import shutil
from pathlib import Path

import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM, PreTrainedModel
from trl import ModelConfig, SFTConfig

from checkpoints.legal import legal_files
from checkpoints.settings import repair_generation_config
from model_cards.render import read_readme

from .arguments import LORA, RECIPE, ChatArguments
from .base import Base, agree_on_tokens
from .chat import Chat
from .trainer import require_finite


RUN_FILE, BEFORE_FILE, RESULTS_FILE = "run.json", "before.json", "results.json"
# The estimator's constants of a run that refreshes them: in each checkpoint and, at the end, in the output folder
CONSTANTS_FILE = "variance_constants.json"
# Tokens of the batch that proves a merge, and the largest error of its logits, relative to the largest of them
PROOF_SHAPE, MERGE_TOLERANCE = (2, 32), 1e-3
SAME_RUN = [*RECIPE, *LORA, "use_peft", "train_norms", "refresh_constants_every", "dtype", "model_revision"]
# What a run leaves that was stopped before its first checkpoint: it may be begun again over it
BEGUN = (RUN_FILE, BEFORE_FILE, "training_log.csv", "training_log.png")
# What a run leaves in its folder besides checkpoint-N
OUTPUTS = (
    *(*BEGUN, RESULTS_FILE, CONSTANTS_FILE, "training_args.bin"),
    *("config.json", "generation_config.json", "chat_template.jinja", "adapter", "trainer_state.json"),
    *(
        "tokenizer*",
        "special_tokens_map.json",
        "model*.safetensors*",
        "adapter_*",
        "additional_chat_templates",
        "*_bhyt.py",
        ".unfinished",
        ".finished",
    ),
)


def check_place(training: SFTConfig, arguments: ChatArguments, base: str):
    """Refuses an output_dir that holds the base, a card that could not be kept, or something else, unless the run goes on
    there or may replace it.

    Raises:
        ValueError: with what to do instead.
    """
    folder = Path(training.output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output_dir {folder} is a file: name a folder")
    if Path(base).is_dir() and Path(base).resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"output_dir {folder} holds the base, {base}, which the run would replace: choose another")
    read_readme(folder)
    if training.resume_from_checkpoint or arguments.overwrite or not folder.is_dir():
        return
    if {path.name for path in folder.iterdir()} <= set(BEGUN):
        return
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
    file = folder / RUN_FILE
    if training.resume_from_checkpoint:
        if not file.is_file():
            return
        former = json.loads(file.read_text(encoding="utf-8"))
        if differing := sorted(name for name in run if former.get(name) != run[name]):
            name = differing[0]
            raise ValueError(
                f"{folder} holds another run: its {name} was {former.get(name)!r}, not {run[name]!r}; give what it was "
                "begun with, or choose another output_dir"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.overwrite:
        for pattern in ("checkpoint-*", *OUTPUTS):
            for old in folder.glob(pattern):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
    save_json(file, run)


def describe_run(
    arguments: ChatArguments, training: SFTConfig, model_arguments: ModelConfig, base: Base, rows: Dataset
) -> dict:
    """What makes a run the same run: its base, its data and the settings that shape the optimisation."""
    digest = hashlib.sha256(json.dumps(list(rows), sort_keys=True).encode()).hexdigest()
    given = vars(arguments) | vars(model_arguments) | vars(training)
    settings = {name: given[name] for name in SAME_RUN}
    return {"base": base.name, "data_sha256": digest, **json.loads(json.dumps(settings, default=str))}


def save_json(file: Path, content: dict):
    partial = file.with_suffix(".tmp")
    partial.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(file)


def read_constants(folder: Path) -> tuple[dict[int, tuple[float, float]], list[dict]]:
    """((r, c) of each layer, every refresh so far) as RefreshConstants left them in a folder."""
    kept = json.loads((folder / CONSTANTS_FILE).read_text(encoding="utf-8"))
    return {int(n): tuple(pair) for n, pair in kept["constants"].items()}, kept["history"]


def save_finished(
    trained: Path, folder: Path, base: Base, chat: Chat, arguments: ChatArguments
) -> PreTrainedModel | PeftModel:
    """Makes the folder's model of what the trainer saved in `trained`: merged, in its dtype, with the chat's settings.

    Every file is written beside its place and moved there at the end, config.json last. Returns what was saved, loaded
    from there.

    Raises:
        NotFinite: a weight that became infinite or no number when an adapter was merged.
    """
    staged = folder / ".finished"
    shutil.rmtree(staged, ignore_errors=True)
    is_adapter = (trained / "adapter_config.json").is_file()
    if is_adapter and not arguments.merge_adapter:
        shutil.copytree(trained, staged, ignore=shutil.ignore_patterns("training_args.bin", "README.md"))
    else:
        model = _open(trained, base)
        if is_adapter and (folder / CONSTANTS_FILE).is_file():
            # An adapter's weights do not hold what was refreshed in its base
            constants, _ = read_constants(folder)
            model.get_base_model().set_variance_constants(constants)
        model = merge(model) if isinstance(model, PeftModel) else model
        repair_generation_config(base.name, model.generation_config)
        agree_on_tokens(model, chat)
        _cast(model, base, arguments.save_dtype)
        require_finite(model.state_dict(), "in the dtype to save it in (save_dtype)")
        model.save_pretrained(str(staged))
    chat.save(staged)
    for file in (*legal_files(base.folder), *base.folder.glob("conversion_report.*")):
        shutil.copy(file, staged)
    names = sorted((path.name for path in staged.iterdir()), key=lambda name: name == "config.json")
    for name in names:
        # No folder replaces one that is not empty
        if (folder / name).is_dir():
            shutil.rmtree(folder / name)
        (staged / name).replace(folder / name)
    staged.rmdir()
    if is_adapter and arguments.merge_adapter:
        shutil.rmtree(folder / "adapter", ignore_errors=True)
        (trained / "training_args.bin").unlink(missing_ok=True)
        trained.replace(folder / "adapter")
    else:
        shutil.rmtree(trained)
    return _open(folder, base)


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


def _cast(model: PreTrainedModel, base: Base, save_dtype: str):
    """Brings every parameter to the dtype to save it in: with "auto" the one that the base stores it in."""
    kept = base.stored_dtypes if save_dtype == "auto" else {}
    other = base.stored_dtype if save_dtype == "auto" else getattr(torch, save_dtype)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(kept.get(name, other))


def _open(folder: Path, base: Base) -> PreTrainedModel | PeftModel:
    """The model of a folder in fp32; an adapter on its base."""
    if (folder / "adapter_config.json").is_file():
        model = AutoModelForCausalLM.from_pretrained(
            base.name, config=base.config, dtype=torch.float32, **base.loading
        )
        return PeftModel.from_pretrained(model, folder)
    code = {"trust_remote_code": base.loading["trust_remote_code"]}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **code)
