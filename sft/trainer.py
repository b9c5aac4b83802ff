"""SFTTrainer, and the callbacks that every run gets."""

import csv
import os
import signal
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from trl import SFTTrainer

from checkpoints.command_line import Ended, Handlers, Interrupted, handle_signals, restore_signals

from .picture import draw_training


class NotFinite(Ended):
    """A loss or a gradient that is not a number: the run stops before the step, nothing broken is saved."""


def require_finite(tensors: Mapping[str, torch.Tensor], when: str):
    """Raises NotFinite, which names the first tensor that is not."""
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise NotFinite(f"{broken[0]} is not finite {when} ({len(broken)} of {len(tensors)} tensors)")


class ChatTrainer(SFTTrainer):
    """Identical to SFTTrainer except:

    - it stops before the step in which the loss or a gradient is not finite, and saves no weights that are not;
    - figures of the norms are logged with the training loss;
    - it writes no card: the pipeline writes one that is right, at the end;
    - with `fresh_optimizer` it goes on from a checkpoint with a new optimizer, at that step's place in the schedule.
    """

    def __init__(self, *args, fresh_optimizer: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        self.norm_figures: dict[str, float] = {}
        self.fresh_optimizer = fresh_optimizer

    def _load_optimizer_and_scheduler(self, checkpoint):
        if checkpoint is None or not self.fresh_optimizer:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        if not isinstance(self.lr_scheduler, LambdaLR) or self.is_deepspeed_enabled:
            raise ValueError(
                "fresh_optimizer needs a schedule that is a function of the step, and no DeepSpeed: leave it out, or begin again"
            )
        # Not step by step, which warns that the optimizer took no step between
        self.lr_scheduler.last_epoch = self.state.global_step - 1
        with warnings.catch_warnings(action="ignore"):
            self.lr_scheduler.step()

    def log(self, logs, start_time=None):
        if "loss" in logs:
            logs |= self.norm_figures
            self.norm_figures = {}
        super().log(logs, start_time)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        step = self.state.global_step + 1
        if not loss.isfinite():
            raise NotFinite(f"the loss became {loss.item()} in step {step}")
        # fp16's scaler meets infinite gradients on purpose, and skips the step; DeepSpeed keeps gradients to itself
        if self.accelerator.sync_gradients and self.accelerator.scaler is None and not self.is_deepspeed_enabled:
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
            if not (norm.full_tensor() if isinstance(norm, DTensor) else norm).isfinite():
                raise NotFinite(f"a gradient is not finite in step {step}")
        return loss

    def _save(self, output_dir=None, state_dict=None):
        # What is gathered from several processes is handed over here
        weights = dict(self.model.named_parameters()) if state_dict is None else state_dict
        require_finite(weights, f"after step {self.state.global_step}")
        super()._save(output_dir, state_dict)

    def create_model_card(self, *args, **kwargs):
        pass


class StopWhenAsked(TrainerCallback):
    """The first Ctrl-C, SIGTERM or SIGHUP ends the run after the step, with a checkpoint to resume from; the second at once.

    A signal that was ignored when the run began (nohup, a shell's background) stays ignored. `stopped_by` is the signal's
    number, the same in every process, 0 for a run that nobody stopped.
    """

    def __init__(self, accelerator):
        self.accelerator = accelerator
        self.asked_by = 0
        self.stopped_by = 0
        self._former: Handlers = {}

    def on_train_begin(self, args, state, control, **kwargs):
        self._former = handle_signals(self._ask)

    def on_train_end(self, args, state, control, **kwargs):
        self.restore()

    def restore(self):
        restore_signals(self._former)
        self._former = {}

    def _ask(self, number, frame):
        if self.asked_by:
            raise KeyboardInterrupt if number == signal.SIGINT else Interrupted(number)
        self.asked_by = number
        # Not print, which may be under way in the code that the signal broke into
        os.write(1, b"stopping after this step, with a checkpoint; once more stops at once\n")

    def on_step_end(self, args, state, control, **kwargs):
        # Every process has to stop at the same step, whichever of them was asked
        asked = self.accelerator.gather(torch.tensor([self.asked_by], device=self.accelerator.device))
        if number := int(asked.max()):
            self.stopped_by = number
            control.should_save = control.should_training_stop = True


class LogFiles(TrainerCallback):
    """Keeps training_log.csv and training_log.png in the output folder up to date, resumed runs included."""

    def __init__(self, folder: Path):
        self.folder = folder

    def on_log(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            write_csv(state.log_history, self.folder / "training_log.csv")

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            draw_training(state.log_history, self.folder / "training_log.png")

    on_train_end = on_save


def write_csv(history: list[dict], file: Path):
    """One row a log entry, one column a key that any of them has."""
    columns = ["step", "epoch"]
    columns += sorted({key for entry in history for key in entry} - set(columns))
    partial = file.with_suffix(".tmp")
    with partial.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(history)
    partial.replace(file)
