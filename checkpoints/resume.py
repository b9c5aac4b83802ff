"""Checkpoints that a run left as it went: which of them training can go on from, and what is broken in the others.

A checkpoint is whole if nothing that training reads is missing, cut off or unreadable: weights, optimizer, learning rate
schedule, random numbers, settings. The layouts of one process (and DDP), of FSDP and of DeepSpeed all count. Files are opened,
not read through: a header tells a file that was cut off.
"""

import re
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

from .weights import read_json


# Written last of all: a folder without it was never finished
STATE_FILE = "trainer_state.json"
NAME = re.compile(r"checkpoint-(\d+)")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
# What torch.save writes, an archive of zip's kind
ARCHIVES = ("optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "rng_state*.pth", "pytorch_model*.bin")
# Folders in which each process writes its share
FSDP_WEIGHTS, FSDP_OPTIMIZER, DEEPSPEED = "pytorch_model_fsdp_*", "optimizer_*", "global_step*"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run that were finished, the newest last."""
    found = [
        path for path in folder.glob("checkpoint-*") if NAME.fullmatch(path.name) and (path / STATE_FILE).is_file()
    ]
    return sorted(found, key=_step)


def last_checkpoint(folder: Path, fresh_optimizer: bool = False, remedy: str = "") -> Path | None:
    """The newest finished checkpoint; None where there is none. Arguments and errors as `require_whole` has them."""
    if not (found := checkpoints(folder)):
        return None
    require_whole(found[-1], fresh_optimizer, remedy)
    return found[-1]


def last_whole(folder: Path, before: int | None = None) -> Path | None:
    """The newest checkpoint that is whole, of those before a step where one is given."""
    found = [path for path in checkpoints(folder) if before is None or _step(path) < before]
    return next((path for path in reversed(found) if flaw(path) is None), None)


def require_whole(checkpoint: Path, fresh_optimizer: bool = False, remedy: str = ""):
    """Refuses a checkpoint that training cannot go on from; `remedy` says what else starts the optimizer anew.

    Raises:
        ValueError: the broken file, and the newest whole checkpoint before it.
    """
    broken = flaw(checkpoint, fresh_optimizer)
    if broken is None:
        return
    former = last_whole(checkpoint.parent, _step(checkpoint)) if NAME.fullmatch(checkpoint.name) else None
    if former:
        advice = f"the newest whole checkpoint before it is {former}, remove {checkpoint} to go on from there"
    else:
        advice = "there is no whole checkpoint before it, begin again"
    only_optimizer = not fresh_optimizer and flaw(checkpoint, fresh_optimizer=True) is None
    raise ValueError(f"{broken}: {advice}{f'; or {remedy}' if remedy and only_optimizer else ''}")


def flaw(checkpoint: Path, fresh_optimizer: bool = False) -> str | None:
    """What keeps training from going on here, in words that name the file; None for a whole checkpoint.

    fresh_optimizer: optimizer and schedule may be missing, for they are not read, and random numbers, which begin anew too.
    """
    try:
        if not (checkpoint / STATE_FILE).is_file():
            return f"{checkpoint} lacks {STATE_FILE}, which is written last"
        settings = {file.name: read_json(file) for file in sorted(checkpoint.glob("*.json"))}
        if not isinstance(settings[STATE_FILE].get("global_step"), int):
            return f"{checkpoint / STATE_FILE} does not say which step it is"
        return _weights_flaw(checkpoint, settings) or _training_flaw(checkpoint, fresh_optimizer)
    except ValueError as error:
        return str(error)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def _weights_flaw(checkpoint: Path, settings: dict[str, dict]) -> str | None:
    indices = [values.get("weight_map", {}) for file, values in settings.items() if file.endswith(".index.json")]
    names = {name for index in indices for name in index.values()}
    if missing := sorted(name for name in names if not (checkpoint / name).is_file()):
        return f"{checkpoint} lacks {missing[0]}, which its index names"
    for file in sorted(checkpoint.glob("*.safetensors")):
        try:
            with safe_open(file, "pt"):
                pass
        except SafetensorError as error:
            return f"{file} is damaged ({error})"
    sharded = [*checkpoint.glob(FSDP_WEIGHTS), *checkpoint.glob(DEEPSPEED), *checkpoint.glob("pytorch_model*.bin")]
    if not sharded and not any((checkpoint / name).is_file() for name in WEIGHTS):
        return f"{checkpoint} holds no weights"
    return None


def _training_flaw(checkpoint: Path, fresh_optimizer: bool) -> str | None:
    ignored = ("optimizer", "scheduler") if fresh_optimizer else ()
    archives = [file for pattern in ARCHIVES for file in sorted(checkpoint.glob(pattern))]
    folders = [path for pattern in (FSDP_WEIGHTS, FSDP_OPTIMIZER) for path in sorted(checkpoint.glob(pattern))]
    for path in (path for path in folders if path.is_dir() and not path.name.startswith(ignored)):
        # The plan of the shares is written when all of them are
        if not (path / ".metadata").is_file():
            return f"{path} lacks .metadata, which is written last"
    steps = sorted(checkpoint.glob(DEEPSPEED))
    for step in steps:
        shares = sorted(step.glob("*.pt"))
        if not any("optim_states" in file.name for file in shares):
            return f"{step} holds no optimizer"
        archives += shares
    for file in (file for file in archives if not file.name.startswith(ignored)):
        if not zipfile.is_zipfile(file):
            return f"{file} is damaged (cut off, or not what torch saves)"
    # DeepSpeed keeps both among its shares
    if fresh_optimizer or steps:
        return None
    if not [*checkpoint.glob("optimizer.*"), *checkpoint.glob(FSDP_OPTIMIZER)]:
        return f"{checkpoint} lacks its optimizer (optimizer.pt)"
    if not (checkpoint / "scheduler.pt").is_file():
        return f"{checkpoint} lacks scheduler.pt"
    # Without them dropout and whatever else is drawn would go on otherwise
    return None if [*checkpoint.glob("rng_state*.pth")] else f"{checkpoint} lacks its random numbers (rng_state.pth)"
