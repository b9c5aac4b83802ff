"""results.json of a run, and what a reader sees of it."""

import json
import platform
from importlib.metadata import version
from pathlib import Path

from transformers.trainer_callback import TrainerState
from trl import ModelConfig, SFTConfig

from model_cards.licence import data_licence
from modeling_bhyt import __version__

from .arguments import LORA, RECIPE, ChatArguments
from .base import Base
from .chat import Chat, Tokenized
from .data import Conversations


PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")


def gather_results(
    base: Base,
    chat: Chat,
    texts: list[tuple[str, Conversations, Tokenized]],
    summary: list[tuple[str, str]],
    settings: tuple[ChatArguments, SFTConfig, ModelConfig],
    state: TrainerState,
    figures: tuple[dict, dict],
    minutes: float,
) -> dict:
    """All that a run was and did; `figures` are those before and after."""
    arguments, training, model = settings
    recipe = {name: getattr(training, name) for name in RECIPE} | {"dtype": model.dtype}
    recipe |= {name: getattr(model, name) for name in LORA} if model.use_peft else {}
    recipe |= {name: getattr(arguments, name) for name in ("train_norms", "refresh_constants_every", "save_dtype")}
    before, after = figures
    best = state.best_model_checkpoint
    return json.loads(
        json.dumps(
            {
                "bhyt_version": __version__,
                "versions": {name: version(name) for name in PACKAGES} | {"python": platform.python_version()},
                "base": {
                    "name": base.published_name,
                    "model_type": base.config.model_type,
                    "norm_type": getattr(base.config, "norm_type", None),
                    **base.licence,
                    "conversion": base.conversion,
                },
                "data": {
                    purpose: _describe(conversations, rows, arguments.data_license if purpose == "data" else None)
                    for purpose, conversations, rows in texts
                },
                "chat": {"template": chat.origin, "stop_token": chat.stop_token, "stop_id": chat.stop_id},
                "recipe": recipe,
                "summary": summary,
                "training": {
                    "num_steps": state.global_step,
                    "minutes": minutes,
                    "final_loss": last(state.log_history, "loss"),
                    "mean_loss": mean_loss(state.log_history),
                    "best_evaluation_loss": state.best_metric,
                    "best_checkpoint": Path(best).name if best else None,
                    "saved_checkpoint": Path(best).name if best and training.load_best_model_at_end else None,
                },
                "before": before,
                "after": after,
            },
            default=str,
        )
    )


def _describe(conversations: Conversations, rows: Tokenized, licence: str | None) -> dict:
    """Name, form and every count of the data as read, then as tokenized.

    licence: what the user says of it, which counts where its card on the Hub does not.
    """
    read = {name: value for name, value in vars(conversations).items() if name not in ("rows", "bad", "num_read")}
    tokenized = {name: value for name, value in vars(rows).items() if name != "dataset"}
    licensed = {"license": data_licence(conversations.hub_id, licence)}
    return {**read, **licensed, "num_kept": len(rows.dataset), **tokenized}


def last(history: list[dict], key: str) -> float | None:
    """The newest value of a key in the trainer's log."""
    return next((entry[key] for entry in reversed(history) if key in entry), None)


def mean_loss(history: list[dict]) -> float | None:
    """The mean of the logged losses, weighted by the steps that each is the mean of; those of a resumed run included."""
    losses = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    starts = [0, *(step for step, _ in losses)]
    total = sum((step - start) * loss for start, (step, loss) in zip(starts, losses))
    return total / losses[-1][0] if losses else None


def result_rows(results: dict) -> list[tuple[str, str, str, str]]:
    """(what, before, after, change) for the terminal and the card."""
    before, after = results["before"], results["after"]
    rows = []
    for text, found in before["perplexity"].items():
        old, new = found["perplexity"], after["perplexity"][text]["perplexity"]
        rows.append((f"perplexity, {text}", f"{old:.3f}", f"{new:.3f}", f"x {new / old:.4f}"))
    if before["replies"]:
        name = results["data"]["evaluation"]["name"]
        for key, label in (("loss", "loss on replies"), ("first_token_accuracy", "first token right")):
            old, new = before["replies"][key], after["replies"][key]
            rows.append((f"{label}, {name}", f"{old:.4f}", f"{new:.4f}", f"{new - old:+.4f}"))
    return rows
