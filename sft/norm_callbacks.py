"""Callbacks of runs whose norms are ours: what training does to them, and constants that follow the weights.

Mean squares are seen by hooks, in the steps in which they are asked for and in no other. Padding is left out, and so is
each document's first token, whose massive activations no estimate is meant for. Recomputed blocks (gradient
checkpointing) are seen twice, each token alike, which changes no mean.
"""

from math import sqrt
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainerCallback
from transformers.integrations import is_deepspeed_zero3_enabled

from modeling_bhyt.constants_bhyt import running_module
from modeling_bhyt.normalization_bhyt import BHyT, EstimatingSite, fit_ratio_and_offset, fit_sums, mean_square

from .saving import CONSTANTS_FILE, read_constants, save_json
from .trainer import ChatTrainer


SATURATED = 0.99


def plain_model(trainer: Trainer) -> PreTrainedModel:
    """The model without PEFT's around it."""
    model = trainer.model
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class NormCallback(TrainerCallback):
    """Shows `see` every norm that runs in a step that `is_due`, with the tokens that count, and `finish` ends the step."""

    def __init__(self, trainer: ChatTrainer):
        self.trainer = trainer
        self.model = plain_model(trainer)
        self._handles: list = []

    def is_due(self, args, state) -> bool:
        """Whether the step that begins is to be watched."""
        raise NotImplementedError

    def see(self, layer: int, norm: nn.Module, x: Tensor, ms: Tensor | None, y: Tensor, counted: Tensor):
        """x, y (B, T, D); ms (B, T, 1) as the block hands it on, None at a first site; counted (B, T), True for tokens that count."""
        raise NotImplementedError

    def finish(self, state):
        raise NotImplementedError

    def on_step_begin(self, args, state, control, **kwargs):
        if not self.is_due(args, state):
            return
        decoder = self.model.base_model
        self._handles = [decoder.register_forward_pre_hook(self._note_tokens, with_kwargs=True)]
        for layer_idx, layer in enumerate(decoder.layers):
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                self._handles.append(running_module(norm).register_forward_hook(self._hook(layer_idx)))

    def on_step_end(self, args, state, control, **kwargs):
        if self._handles:
            for handle in self._handles:
                handle.remove()
            self._handles = []
            self.finish(state)

    def _note_tokens(self, module, arguments, kwargs):
        embeds, ids = kwargs.get("inputs_embeds"), kwargs.get("input_ids", arguments[0] if arguments else None)
        shape, device = (ids.shape, ids.device) if embeds is None else (embeds.shape[:2], embeds.device)
        positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        # Packed documents have positions of their own; a padded row is one document
        positions = torch.arange(shape[1], device=device) if positions is None else positions
        self._counted = (positions != 0).expand(shape)
        if mask is not None and mask.ndim == 2:
            self._counted = self._counted & mask.bool()

    def _hook(self, layer_idx: int):
        @torch.no_grad()
        def hook(norm, arguments, output):
            ms = arguments[1] if len(arguments) > 1 else None
            self.see(layer_idx, norm, arguments[0], ms, output[0], self._counted)

        return hook


class NormStatistics(NormCallback):
    """Adds to the losses that are logged, from all tokens of the same step:

    norms/lambda_min, lambda_max                over all sites, before the step's update
    norms/depth_effective_max, depth_limit      largest rms(gamma) * lambda / kappa, and 1 / sqrt(L) (Theorem 3.5)
    norms/saturated_share_max                   share of |tanh| > 0.99, at the site that has most
    norms/estimator_log_error_max               root mean square of log((r m + c) / m'), at the layer that has most
    """

    def __init__(self, trainer: ChatTrainer):
        super().__init__(trainer)
        self._forget()

    def _forget(self):
        self._lambdas, self._effective = [], []
        self._saturated, self._errors = {}, {}

    def is_due(self, args, state) -> bool:
        step = state.global_step + 1
        if args.logging_strategy == "epoch":
            return step % max(1, round(state.max_steps / state.num_train_epochs)) == 0
        is_first = step == 1 and args.logging_first_step
        return args.logging_strategy == "steps" and (is_first or step % max(1, int(state.logging_steps)) == 0)

    def see(self, layer, norm, x, ms, y, counted):
        if isinstance(norm, BHyT):
            # Inside forward parameters are whole, however they are sharded between steps
            lam, gain = norm.lam.abs().item(), norm.weight.float().pow(2).mean().sqrt().item()
            self._lambdas.append(lam)
            self._effective.append(gain * lam / norm.kappa)
            beyond = (y.abs() > SATURATED * norm.weight.abs()).float().mean(-1)[counted].double()
            site = (layer, "attention" if ms is None else "mlp")
            _add(self._saturated, site, torch.stack([beyond.sum(), beyond.new_tensor(beyond.numel())]))
        if isinstance(norm, EstimatingSite):
            error = torch.log(norm.estimate(ms) / mean_square(x)).squeeze(-1)[counted].double()
            _add(self._errors, layer, torch.stack([error.pow(2).sum(), error.new_tensor(error.numel())]))

    def finish(self, state):
        figures = {}
        if self._lambdas:
            figures["norms/lambda_min"], figures["norms/lambda_max"] = min(self._lambdas), max(self._lambdas)
            figures["norms/depth_effective_max"] = max(self._effective)
            figures["norms/depth_limit"] = 1 / sqrt(self.model.config.num_hidden_layers)
            figures["norms/saturated_share_max"] = max(self._means(self._saturated))
        if self._errors:
            figures["norms/estimator_log_error_max"] = sqrt(max(self._means(self._errors)))
        self.trainer.norm_figures = figures
        self._forget()

    def _means(self, sums: dict) -> list[float]:
        total = self.trainer.accelerator.reduce(torch.stack(list(sums.values())), "sum")
        return (total[:, 0] / total[:, 1].clamp(min=1)).tolist()


class RefreshConstants(NormCallback):
    """Every `every` steps gives the estimator the constants that belong to the weights as they are now.

    "published" and "uniform_attention": c from the weights, adapters merged in, after the step. "fitted": r and c by
    least squares over the tokens of the step, of all processes. The logs get medians of old and new, variance_constants.json of each
    checkpoint and of the output folder every layer's. A resumed run takes them up again, whether or not the weights in
    the checkpoint hold them (an adapter's do not).

    Raises:
        ValueError: a model without an estimator or whose weights cannot be read or changed.
    """

    def __init__(self, trainer: ChatTrainer, every: int):
        super().__init__(trainer)
        config = self.model.config
        reason = None
        if not getattr(config, "estimated_layers", []):
            reason = "this base estimates no variance"
        elif config.learnable_variance:
            reason = "the estimator's constants are trained (learnable_variance)"
        elif is_deepspeed_zero3_enabled():
            reason = "ZeRO-3 keeps the weights where they cannot be read: use FSDP2 or ZeRO-2"
        elif config.second_site_estimator != "fitted" and getattr(self.model, "is_quantized", False):
            reason = "constants from weights cannot be read from 4 or 8 bits: load the base in floating point"
        if reason:
            raise ValueError(f"refresh_constants_every is {every}, but {reason}; or leave it out")
        self.every = every
        self.is_fitted = config.second_site_estimator == "fitted"
        self.history: list[dict] = []
        self._sums: dict[int, Tensor] = {}

    def is_due(self, args, state) -> bool:
        return (state.global_step + 1) % self.every == 0

    def see(self, layer, norm, x, ms, y, counted):
        if self.is_fitted and isinstance(norm, EstimatingSite):
            own, given = mean_square(x).squeeze(-1)[counted], ms.squeeze(-1)[counted]
            _add(self._sums, layer, fit_sums(given, own))

    def finish(self, state):
        old = self.model.variance_constants()
        if self.is_fitted:
            new = self._fitted()
        else:
            new = {n: (old[n][0], offset) for n, offset in self.model.variance_constants_from_weights().items()}
        self.model.set_variance_constants(new)
        # As they are now, rounded to the parameters' precision
        new = self.model.variance_constants()
        figures = {}
        for index, name in enumerate(("r", "c")):
            figures[f"constants/{name}_old_median"] = median(pair[index] for pair in old.values())
            figures[f"constants/{name}_new_median"] = median(pair[index] for pair in new.values())
        # Not SFTTrainer's own, which would take the losses gathered since the last log along. A log is taken for the one
        # that was due
        was_due = self.trainer.control.should_log
        Trainer.log(self.trainer, figures)
        self.trainer.control.should_log = was_due
        self.history += [
            {"step": state.global_step, "layer": n, "r_old": old[n][0], "r_new": r, "c_old": old[n][1], "c_new": c}
            for n, (r, c) in new.items()
        ]

    def _fitted(self) -> dict[int, tuple[float, float]]:
        layers = self.model.config.estimated_layers
        if missing := [n for n in layers if n not in self._sums]:
            raise ValueError(
                f"refresh_constants_every: layer {missing[0]} was not seen in this step; leave out torch_compile"
            )
        total = self.trainer.accelerator.reduce(torch.stack([self._sums.pop(n) for n in layers]), "sum").cpu()
        return dict(zip(layers, map(fit_ratio_and_offset, total)))

    def on_train_begin(self, args, state, control, **kwargs):
        self._take_up(args.resume_from_checkpoint)

    def on_save(self, args, state, control, **kwargs):
        self._write(Path(args.output_dir, f"checkpoint-{state.global_step}"), state)

    def on_train_end(self, args, state, control, **kwargs):
        if args.load_best_model_at_end:
            self._take_up(state.best_model_checkpoint)
        self._write(Path(args.output_dir), state)

    def _take_up(self, checkpoint: str | None):
        if checkpoint and Path(checkpoint, CONSTANTS_FILE).is_file():
            constants, self.history = read_constants(Path(checkpoint))
            self.model.set_variance_constants(constants)

    def _write(self, folder: Path, state):
        # Read by every process, for parameters may be sharded; written by one
        constants = self.model.variance_constants()
        if state.is_world_process_zero:
            save_json(folder / CONSTANTS_FILE, {"constants": constants, "history": self.history})


def _add(sums: dict, key, values: Tensor):
    sums[key] = sums[key] + values if key in sums else values
