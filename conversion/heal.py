"""Heals a graft: trains it against the logits of its source, mean KL(source || graft) over the tokens of a text."""

import contextlib
from pathlib import Path
from statistics import median

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import kl_div
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from checkpoints.outputs import is_folder, remove_leftover
from checkpoints.resume import NAME, checkpoints, last_checkpoint
from checkpoints.weights import StoredTensors, weight_files
from evaluation.perplexity import input_device
from modeling_bhyt import BHyTLlamaForCausalLM
from modeling_bhyt.normalization_bhyt import BHyT, EstimatingSite, mean_square

from .arguments import HealingArguments


# Steps of a matrix and of a LoRA factor at learning_rate 1; vectors and numbers step in proportion to their own size
MATRIX_RATE, LORA_RATE = 1e-3, 1e-2
LORA_RANK = 8
NORM_SUFFIXES = ("layernorm.weight", "layernorm.lam", ".variance_ratio", ".variance_offset", "model.norm.weight")


class Distillation(Trainer):
    """Identical to Trainer except: the loss is KL(teacher || student), and each parameter has a rate of its own."""

    def __init__(self, teacher: PreTrainedModel, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = teacher
        self.model_accepts_loss_kwargs = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = inputs["input_ids"]
        with torch.no_grad():
            expected = self.teacher(input_ids=ids.to(input_device(self.teacher)), use_cache=False).logits
        outputs = model(input_ids=ids, use_cache=False)
        expected = expected.to(ids.device).float().log_softmax(-1).flatten(0, 1)
        loss = kl_div(
            outputs.logits.float().log_softmax(-1).flatten(0, 1), expected, reduction="batchmean", log_target=True
        )
        if not loss.isfinite():
            raise ValueError(
                f"the loss became {loss.item()}: take a smaller learning_rate than {self.args.learning_rate}"
            )
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, model=None):
        offset_scales = _offset_scales(self.model, self.train_dataset)
        groups = [
            {"params": [parameter], "lr": self.args.learning_rate * _rate(name, parameter, offset_scales)}
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        ]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
        return self.optimizer


def _rate(name: str, parameter: Tensor, offset_scales: dict[str, float]) -> float:
    if "lora_" in name:
        return LORA_RATE
    if parameter.ndim > 1:
        return MATRIX_RATE
    if name.endswith("variance_offset"):
        return next(scale for prefix, scale in offset_scales.items() if prefix in name)
    return parameter.detach().float().pow(2).mean().sqrt().item()


@torch.no_grad()
def _offset_scales(model: nn.Module, rows: list[dict]) -> dict[str, float]:
    """The median mean square of each block's input: what makes a step of c weigh as much as one of r."""
    scales: dict[str, float] = {}

    def watch(layer: str):
        def see(module, arguments):
            scales[layer] = median(mean_square(arguments[0])[:, 1:].flatten().tolist())

        return see

    handles = [
        module.register_forward_pre_hook(watch(name[name.index("layers.") :].removesuffix("input_layernorm")))
        for name, module in model.named_modules()
        if name.endswith("input_layernorm") and isinstance(module, BHyT)
    ]
    device = next(model.parameters()).device
    model(input_ids=torch.as_tensor(rows[0]["input_ids"])[None].to(device), use_cache=False)
    for handle in handles:
        handle.remove()
    return scales


class RaiseLambda(TrainerCallback):
    """Raises lambda at every site to a target, in equal ratios over the first half of training.

    gamma falls by the same ratio, so that gamma * lambda / kappa, the slope at 0, is as it was.
    """

    def __init__(self, model: nn.Module, target: float, num_steps: int):
        self.sites = [module for module in model.modules() if isinstance(module, BHyT) and module.weight.requires_grad]
        self.target, self.num_raises = target, num_steps

    @torch.no_grad()
    def on_step_begin(self, args, state, control, **kwargs):
        every = max(1, state.max_steps // (2 * self.num_raises))
        done, rest = divmod(state.global_step, every)
        if rest == 0 and done < self.num_raises:
            for site in self.sites:
                ratio = (self.target / site.lam.abs().item()) ** (1 / (self.num_raises - done))
                site.lam.mul_(ratio)
                site.weight.div_(ratio)


def checkpoints_folder(arguments: HealingArguments) -> Path:
    """Where the trainer keeps its checkpoints, beside OUTPUT: it stays where a run was stopped."""
    return Path(f"{arguments.output}.checkpoints")


def resumed_checkpoint(arguments: HealingArguments) -> str | None:
    """Where healing goes on from; None for a fresh run. Asked before any work, and again when training starts.

    Raises:
        ValueError: checkpoints of an earlier run where none are to be resumed, the other way round, or a broken one.
    """
    folder = checkpoints_folder(arguments)
    if not arguments.resume:
        if checkpoints(folder):
            raise ValueError(f"{folder} holds a run that was stopped: go on with --resume, or remove it")
        # The trainer would remove it as one of its own
        if others := _checkpoint_folders(folder):
            raise ValueError(f"{others[0]} is no finished checkpoint: move it away, or remove it")
        return None
    if (last := last_checkpoint(folder)) is None:
        raise ValueError(f"{folder} holds no checkpoint to resume from: leave out --resume")
    return str(last)


@torch.enable_grad()
def heal_model(
    folder: Path, teacher: PreTrainedModel, windows: Tensor, arguments: HealingArguments
) -> BHyTLlamaForCausalLM:
    """The BHyT model of `folder`, trained on `windows` (N, T) of token ids, in fp32.

    r and c are trained whatever the configuration says, which keeps saying it; so is lambda, unless it is to stay.

    Raises:
        ValueError: a loss that is not finite, and what `resumed_checkpoint` refuses.
    """
    learnable = {"learnable_variance": True} | ({"learnable_lambda": False} if arguments.freeze_lambda else {})
    student = BHyTLlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, **learnable)
    trained = _with_trainable(student, arguments.train)
    trainer = Distillation(
        teacher,
        model=trained,
        args=_training_arguments(arguments),
        train_dataset=[{"input_ids": row} for row in windows],
        callbacks=[RaiseLambda(student, arguments.target_lambda, arguments.lambda_steps)]
        if arguments.target_lambda
        else [],
    )
    trainer.train(resume_from_checkpoint=resumed_checkpoint(arguments))
    if arguments.train == "lora":
        student = trained.merge_and_unload()
    with torch.no_grad():
        for module in student.modules():
            if isinstance(module, EstimatingSite):
                # In training a negative value means its reflection; a constant is written as what it means
                module.variance_ratio.abs_()
                module.variance_offset.abs_()
    return student.cpu().eval()


def remove_checkpoints(arguments: HealingArguments):
    """Removes what a finished healing would have resumed from: the trainer's own folders alone."""
    folder = checkpoints_folder(arguments)
    for checkpoint in _checkpoint_folders(folder):
        remove_leftover(checkpoint)
    with contextlib.suppress(OSError):
        # Gone only where nothing else is in it
        folder.rmdir()


def _checkpoint_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("checkpoint-*") if NAME.fullmatch(path.name) and is_folder(path))


def _with_trainable(student: BHyTLlamaForCausalLM, train: str) -> nn.Module:
    if train == "all":
        return student
    is_norm = {name: name.endswith(NORM_SUFFIXES) and p.requires_grad for name, p in student.named_parameters()}
    model = student
    if train == "lora":
        model = get_peft_model(student, LoraConfig(r=LORA_RANK, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or is_norm.get(name.removeprefix("base_model.model."), False))
    return model


def _training_arguments(arguments: HealingArguments) -> TrainingArguments:
    return TrainingArguments(
        str(checkpoints_folder(arguments)),
        num_train_epochs=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=arguments.heal_batch_size,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.05,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_steps=arguments.save_steps,
        save_total_limit=1,
        seed=arguments.seed,
        use_cpu=not torch.accelerator.is_available(),
        remove_unused_columns=False,
        report_to="none",
    )


def trained_tensors(model: BHyTLlamaForCausalLM, folder: Path) -> dict[str, Tensor]:
    """The model's tensors by name, in the dtypes of the checkpoint in `folder` that it was loaded from."""
    stored = StoredTensors(weight_files(folder))
    state = model.state_dict()
    return {name: state[name].to(stored[name].dtype) for name in stored}
