"""What a run does after its last step, tried before its first: a copy without weights, in a temporary folder.

What a disk, a tokenizer, a template, settings, legal texts or the card would refuse hours later is refused now.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import ModelCard
from peft import PeftModel
from torch import nn
from transformers import AutoConfig, AutoTokenizer
from transformers.trainer_utils import SaveStrategy
from trl import SFTConfig

from model_cards.fine_tuned import save_fine_tuned_card
from model_cards.render import read_readme

from .arguments import ChatArguments
from .base import Base
from .chat import PROBE, Chat
from .proof import HeldOutText
from .results import result_rows
from .saving import carried_files, own_outputs, saved_dtype
from .trainer import ChatTrainer


def rehearse(trainer: ChatTrainer, base: Base, chat: Chat, arguments: ChatArguments, results: dict):
    """Saves, loads and renders everything but weights; `results` are those of the run as far as they are known.

    Raises:
        ValueError: what could not be done at the end, and why.
    """
    folder = Path(trainer.args.output_dir)
    check_room(folder, trainer.model, base, arguments, trainer.args)
    code = {"trust_remote_code": base.loading["trust_remote_code"]}
    with tempfile.TemporaryDirectory(prefix="bhyt-") as name:
        place = Path(name)
        if arguments.merge_adapter or not isinstance(trainer.model, PeftModel):
            with _named("the finished model's settings and code cannot be saved and read again"):
                _save_settings(trainer.model, place)
                AutoConfig.from_pretrained(place, **code)
        with _named("tokenizer and chat template, once saved, do not load again"):
            chat.save(place)
            _check_tokenizer(chat, AutoTokenizer.from_pretrained(place, **code))
        with _named(f"what belongs to {base.name} cannot be copied"):
            for file in carried_files(base):
                shutil.copy(file, place)
        with _named("the card of the finished model cannot be made"):
            _check_card(place, folder, results)
        _check_names(place, folder)


def check_room(folder: Path, model: nn.Module, base: Base, arguments: ChatArguments, training: SFTConfig):
    """Room for what stands side by side at the end: the trained weights, the finished model and one checkpoint.

    Raises:
        ValueError: how much is needed, and how much there is.
    """
    is_adapter = isinstance(model, PeftModel)
    learned = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    trained = learned if is_adapter else sum(p.nbytes for p in model.parameters())
    size = saved_dtype(base, arguments.save_dtype).itemsize
    finished = (
        trained if is_adapter and not arguments.merge_adapter else size * sum(p.numel() for p in model.parameters())
    )
    # Adam's two moments of every number that is trained
    checkpoint = 0 if training.save_strategy == SaveStrategy.NO else trained + 2 * learned
    freed = sum(file.stat().st_size for file in own_outputs(folder)) if arguments.overwrite else 0
    needed = trained + finished + checkpoint - freed
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        raise ValueError(
            f"output_dir {folder} needs {needed / 1e9:.2f} GB (trained weights, finished model"
            f"{' and a checkpoint' if checkpoint else ''}), but {free / 1e9:.2f} GB are free on its disk: make room, or choose "
            "another disk"
        )


def blank_figures(texts: dict[str, HeldOutText], has_conversations: bool) -> dict:
    """Figures of the shape that Proof.measure gives, before anything was measured."""
    replies = {"loss": 1.0, "first_token_accuracy": 1.0} if has_conversations else None
    blank = {name: {"perplexity": 1.0, "protocol": text.protocol} for name, text in texts.items()}
    return {"perplexity": blank, "replies": replies, "answers": []}


@contextmanager
def _named(what: str) -> Iterator[None]:
    try:
        yield
    # Whatever kind of error: at the end it would cost the run
    except Exception as error:
        raise ValueError(f"{what}: {' '.join(f'{error}'.split()) or type(error).__name__}") from error


def _save_settings(model: nn.Module, place: Path):
    plain = model.get_base_model() if isinstance(model, PeftModel) else model
    plain.config.save_pretrained(place)
    plain.generation_config.save_pretrained(place)
    if not getattr(plain, "is_quantized", False):
        # With the code that travels with it, and no weight
        plain.save_pretrained(place, state_dict={})


def _check_tokenizer(chat: Chat, again):
    expected = chat.tokenizer.apply_chat_template(PROBE, chat_template=chat.template, return_dict=True)["input_ids"]
    found = again.apply_chat_template(PROBE, return_dict=True)["input_ids"]
    if found != expected:
        raise ValueError(f"a conversation of {len(expected)} tokens becomes others ({len(found)})")
    for name in ("eos_token_id", "pad_token_id"):
        if getattr(again, name) != getattr(chat.tokenizer, name):
            raise ValueError(f"its {name} {getattr(chat.tokenizer, name)} becomes {getattr(again, name)}")


def _check_names(place: Path, folder: Path):
    for file in place.iterdir():
        if file.is_file() and (folder / file.name).is_dir():
            raise ValueError(
                f"output_dir {folder} holds a folder {file.name}, which stands where a file is to be: move it away"
            )


def _check_card(place: Path, folder: Path, results: dict):
    if (former := read_readme(folder)) is not None:
        (place / "README.md").write_text(former, encoding="utf-8")
    save_fine_tuned_card(place, results, result_rows(results))
    ModelCard.load(place / "README.md")
