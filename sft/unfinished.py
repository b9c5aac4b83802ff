"""Trained weights between the last step and the finished folder: they stay until everything is done.

.unfinished holds them as the trainer saved them, .unfinished.json what else `python -m sft finish FOLDER` needs.
"""

import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate.state import PartialState
from transformers.trainer_callback import TrainerState

from checkpoints.command_line import BAD_INPUT, Ended
from checkpoints.outputs import remove_leftover
from checkpoints.weights import read_json

from .saving import save_json
from .trainer import ChatTrainer


TRAINED, TRAINED_FILE = ".unfinished", ".unfinished.json"
# Whatever the run was begun with, its end begins nothing
ENDING = ("resume_from_checkpoint", "fresh_optimizer", "overwrite", "dry_run")
STATE = ("global_step", "log_history", "best_metric", "best_model_checkpoint")


def keep_trained(trainer: ChatTrainer, folder: Path, words: list[str], facts: dict):
    """Saves what was trained, with the command line and `facts` of the run. Every process has to call it."""
    trained = folder / TRAINED
    try:
        trainer.save_model(str(trained))
    except BaseException:
        # Half of a model is nothing to finish from
        shutil.rmtree(trained, ignore_errors=True)
        raise
    state = PartialState()
    state.wait_for_everyone()
    if state.is_main_process:
        training = {name: getattr(trainer.state, name) for name in STATE}
        kept = {"words": words, "place": os.getcwd(), "state": training, **facts}
        # Escaped: a C locale hands bytes of words over as surrogates, which have no UTF-8
        save_json(folder / TRAINED_FILE, kept, ensure_ascii=True)


def drop_trained(folder: Path, is_adapter_kept: bool):
    """Ends a finished run; an adapter that was merged stays in adapter/.

    As long as both the weights and their file are there, the run can be finished again; once one is gone it is finished, and what
    cannot be removed of the other is named.
    """
    if is_adapter_kept:
        shutil.rmtree(folder / "adapter", ignore_errors=True)
        (folder / TRAINED / "training_args.bin").unlink(missing_ok=True)
        (folder / TRAINED).replace(folder / "adapter")
        remove_leftover(folder / TRAINED_FILE)
    else:
        (folder / TRAINED_FILE).unlink()
        remove_leftover(folder / TRAINED)


def take_up(words: list[str]) -> tuple[dict, list[str]]:
    """(what `keep_trained` kept, the run's command line) for FOLDER and flags after `python -m sft finish`.

    Goes to the folder that the run was begun in, which its paths start from.

    Raises:
        ValueError: no folder, or one without trained weights.
    """
    if not words or words[0].startswith("-"):
        raise ValueError("finish needs a folder: python -m sft finish FOLDER")
    folder = Path(words[0]).absolute()
    if not (folder / TRAINED_FILE).is_file() or not (folder / TRAINED).is_dir():
        raise ValueError(f"{folder} holds no trained weights that wait to be finished: name the output_dir of a run")
    kept = read_json(folder / TRAINED_FILE)
    if Path(kept["place"]).is_dir():
        os.chdir(kept["place"])
    ending = [word for name in ENDING for word in (f"--{name}", "False")]
    return kept, [*kept["words"], *ending, "--output_dir", str(folder), *words[1:]]


def trained_state(kept: dict) -> TrainerState:
    return TrainerState(**kept["state"])


def finish_command(folder: Path) -> str:
    return shlex.join(["python", "-m", "sft", "finish", str(folder)])


@contextmanager
def trained_weights_stay(folder: Path) -> Iterator[None]:
    """Whatever ends the block, its line says where the trained weights are and which command goes on from them."""
    stay = f"the trained weights stay in {folder / TRAINED}, and `{finish_command(folder)}` goes on from them"
    try:
        yield
    except Ended as end:
        end.args = (f"{end}; {stay}",)
        raise
    except BAD_INPUT as error:
        raise ValueError(f"{error}; {stay}") from error
    except Exception as error:
        text = " ".join(": ".join(part for part in (type(error).__name__, str(error)) if part).split())
        raise (MemoryError if isinstance(error, MemoryError) else RuntimeError)(f"{text}; {stay}") from error
