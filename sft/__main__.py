"""python -m sft: data -> SFTTrainer -> evaluation before and after -> card -> Hub; python -m sft finish FOLDER."""

import contextlib
import io
import json
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from accelerate.state import PartialState
from transformers.trainer_callback import TrainerState
from transformers.utils import logging
from trl import ModelConfig, SFTConfig

from checkpoints.command_line import Ended, one_line_end
from checkpoints.resume import last_whole
from checkpoints.weights import read_json
from model_cards.fine_tuned import save_fine_tuned_card
from model_cards.licence import read_licence, settle_licence
from model_cards.publish import check_repository, destination, publish, publish_command

from .arguments import ChatArguments, parse
from .base import Base, adapter_config, check_ties, freeze_constants, load_model, read_base
from .chat import Chat, Tokenized, choose_chat, tokenize
from .data import Conversations, read_conversations
from .lock import only_run
from .norm_callbacks import NormStatistics, RefreshConstants
from .proof import Proof, text_of_proof
from .rehearsal import blank_figures, rehearse
from .results import gather_results, result_rows
from .saving import (
    BEFORE_FILE,
    RESULTS_FILE,
    check_place,
    check_same_run,
    describe_run,
    open_finished,
    save_finished,
    save_json,
    start_run,
    written_files,
)
from .summary import show, summary_rows
from .trainer import ChatTrainer, LogFiles, NotFinite, StopWhenAsked
from .unfinished import (
    TRAINED,
    TRAINED_FILE,
    drop_trained,
    finish_command,
    keep_trained,
    take_up,
    trained_state,
    trained_weights_stay,
)


class Stopped(Ended):
    """The run was asked to stop by a signal, and left a checkpoint to resume from."""

    def __init__(self, step: int, how: str, number: int):
        super().__init__(f"stopped after step {step}: {how}")
        self.code = 128 + number


@dataclass
class Run:
    """What a run works with: `texts` are (purpose, as read, as tokenized), the data to train on first."""

    folder: Path
    settings: tuple[ChatArguments, SFTConfig, ModelConfig]
    base: Base
    chat: Chat
    texts: list[tuple[str, Conversations, Tokenized]]
    proof: Proof

    @property
    def identity(self) -> dict:
        arguments, training, model_arguments = self.settings
        return describe_run(arguments, training, model_arguments, self.base, self.texts[0][2].dataset)

    def results(self, summary, state: TrainerState, before: dict, after: dict, minutes: float) -> dict:
        figures = (before, after)
        return gather_results(self.base, self.chat, self.texts, summary, self.settings, state, figures, minutes)


def prepare(arguments: ChatArguments, training: SFTConfig, model_arguments: ModelConfig, to_push: bool) -> Run:
    """Everything but the model: base, data, chat, and the questions of the proof."""
    base = read_base(model_arguments, training)
    folder = Path(training.output_dir)
    base.licence = settle_licence(read_licence(base.folder), arguments.license, folder, to_push)
    held_out = text_of_proof(arguments, base.tokenizer)
    chat = choose_chat(base.tokenizer, training.chat_template_path)
    # The trainer would read the file again, and over what was made of it; one without .jinja it takes for a Hub id
    training.chat_template_path = None
    texts = read_texts(arguments, training, chat)
    proof = Proof(
        held_out,
        texts[1][2].dataset if len(texts) > 1 else None,
        arguments.questions,
        arguments.max_answer_tokens,
        chat,
        training.per_device_eval_batch_size,
        bool(training.bf16),
    )
    return Run(folder, (arguments, training, model_arguments), base, chat, texts, proof)


def fine_tune(
    arguments: ChatArguments, training: SFTConfig, model_arguments: ModelConfig, to_push: bool, words: list[str]
):
    """base, data -> chat -> trainer -> rehearsal -> figures before -> train -> complete."""
    check_place(training, arguments, str(model_arguments.model_name_or_path))
    run = prepare(arguments, training, model_arguments, to_push)
    trainer = make_trainer(run)
    summary = summary_rows(run.base, run.chat, trainer, run.texts)
    digest = run.proof.digest(run.base)
    known = known_figures(arguments.figures_before, digest)
    state = PartialState()
    if state.is_main_process:
        show(summary, "Fine-tuning")
        blank = blank_figures(run.proof.texts, run.proof.conversations is not None)
        results = run.results(summary, TrainerState(), blank, blank, 0.0)
        rehearse(trainer, run.base, run.chat, arguments, results)
    if arguments.dry_run:
        if state.is_main_process:
            print("dry run: nothing was trained, nothing was written")
        return
    with state.main_process_first():
        start_run(training, arguments, run.identity)
    before = figures_before(run.folder / BEFORE_FILE, digest, run.proof, trainer, known)
    started = time.monotonic()
    with _smaller_rate_advised():
        stopped_by = train(trainer, training)
        minutes = (time.monotonic() - started) / 60
        keep_trained(trainer, run.folder, words, {"summary": summary, "before": before, "minutes": minutes})
    if stopped_by:
        how = f"it was the last, and `{finish_command(run.folder)}` goes on from it"
        raise Stopped(trainer.state.global_step, how, stopped_by)
    if state.is_main_process:
        complete(run, read_json(run.folder / TRAINED_FILE))


def complete(run: Run, kept: dict):
    """trained weights -> save -> figures after -> card; what `keep_trained` kept says the rest of the run."""
    folder, arguments = run.folder, run.settings[0]
    trained = folder / TRAINED
    with trained_weights_stay(folder):
        names = save_finished(trained, folder, run.base, run.chat, arguments)
        after = run.proof.measure(open_finished(folder, run.base))
        is_adapter_kept = (trained / "adapter_config.json").is_file() and arguments.merge_adapter
        results = run.results(kept["summary"], trained_state(kept), kept["before"], after, kept["minutes"])
        results["files"] = written_files(folder, names, is_adapter_kept)
        save_json(folder / RESULTS_FILE, results)
        compared = result_rows(results)
        save_fine_tuned_card(folder, results, compared)
    # The folder is whole: what fails from here on needs no trained weights
    drop_trained(folder, is_adapter_kept)
    if compared:
        show(compared, "What it did", ("", "before", "after", "change"))
    print(f"{folder} is ready: AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)")


def finish(arguments: ChatArguments, training: SFTConfig, model_arguments: ModelConfig, to_push: bool, kept: dict):
    """The end of a run whose trained weights stayed."""
    run = prepare(arguments, training, model_arguments, to_push)
    check_same_run(run.folder, run.identity)
    if PartialState().is_main_process:
        complete(run, kept)


def read_texts(arguments: ChatArguments, training: SFTConfig, chat) -> list[tuple[str, Conversations, Tokenized]]:
    """(purpose, as read, as tokenized) of the conversations to train on and, where there are any, to evaluate on."""
    wanted = [("data", arguments.data, arguments.data_split, arguments.data_config)]
    if arguments.eval_data:
        wanted.append(("evaluation", arguments.eval_data, arguments.eval_split, arguments.eval_config))
    texts = []
    for purpose, name, split, configuration in wanted:
        conversations = read_conversations(name, split, configuration)
        texts.append((purpose, conversations, tokenize(conversations, chat, training.max_length)))
    return texts


def check_batches(num_rows: int, training: SFTConfig):
    """Refuses to drop every batch.

    Raises:
        ValueError: with the reason.
    """
    if training.dataloader_drop_last and num_rows < training.train_batch_size * training.world_size:
        raise ValueError(
            f"dataloader_drop_last drops the last batch that is not full, and {num_rows} rows fill none of "
            f"{training.train_batch_size} in each of {training.world_size} processes: take a smaller "
            "per_device_train_batch_size, or leave dataloader_drop_last out"
        )


def make_trainer(run: Run) -> ChatTrainer:
    (arguments, training, model_arguments), base, chat = run.settings, run.base, run.chat
    model = load_model(base, chat, model_arguments)
    try:
        trainer = ChatTrainer(
            model,
            training,
            train_dataset=run.texts[0][2].dataset,
            eval_dataset=run.proof.conversations if training.eval_strategy != "no" else None,
            processing_class=chat.tokenizer,
            peft_config=adapter_config(model_arguments, model, arguments.train_norms),
            callbacks=[LogFiles(Path(training.output_dir))],
            fresh_optimizer=arguments.fresh_optimizer,
        )
        # An optimizer that is not installed would be missed in step 1, after everything else was done
        trainer.get_optimizer_cls_and_kwargs(training, model)
    except RuntimeError as error:
        raise ValueError(f"the trainer cannot be made: {error}") from error
    check_ties(trainer.model, model_arguments.lora_target_modules)
    # Counted after packing
    check_batches(len(trainer.train_dataset), training)
    freeze_constants(trainer.model)
    trainer.add_callback(NormStatistics(trainer))
    if arguments.refresh_constants_every:
        trainer.add_callback(RefreshConstants(trainer, arguments.refresh_constants_every))
    return trainer


def known_figures(place: str | None, digest: str) -> dict | None:
    """Figures of the base from an earlier run's before.json, where the user names one.

    Raises:
        ValueError: a file that cannot be read, or that holds figures of something else.
    """
    if place is None:
        return None
    try:
        figures = json.loads(Path(place).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"figures_before {place} cannot be read: {error}; leave it out") from error
    if figures.get("of") != digest:
        raise ValueError(f"{place} holds figures of another base, other texts or other questions: leave it out")
    return figures


def figures_before(file: Path, digest: str, proof: Proof, trainer: ChatTrainer, known: dict | None) -> dict:
    """Figures of the base: those that are known, else measured by the main process while the others wait. Kept in `file`, so
    that a resumed run has them."""
    with PartialState().main_process_first():
        kept = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if kept.get("of") != digest:
            save_json(file, known or {"of": digest, **proof.measure(trainer.model)})
    figures = json.loads(file.read_text(encoding="utf-8"))
    del figures["of"]
    return figures


def train(trainer: ChatTrainer, training: SFTConfig) -> int:
    """Trains to the end; the number of a signal that came in the last step, else 0.

    Raises:
        Stopped: it was asked to stop earlier.
        NotFinite: a loss or a gradient that is no number.
    """
    stop = StopWhenAsked(trainer.accelerator)
    trainer.add_callback(stop)
    try:
        trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    finally:
        stop.restore()
    if stop.stopped_by and trainer.state.global_step < trainer.state.max_steps:
        raise Stopped(trainer.state.global_step, "go on with --resume_from_checkpoint last", stop.stopped_by)
    return stop.stopped_by


@contextlib.contextmanager
def _smaller_rate_advised() -> Iterator[None]:
    try:
        yield
    except NotFinite as broken:
        raise NotFinite(
            f"{broken}: the run stopped before it, and saved nothing of it; take a smaller learning_rate"
        ) from broken


def how_to_go_on(folder: Path | None, hub: tuple) -> str:
    """After a signal: what stands in the folder, and what goes on from there."""
    if folder is None:
        return "nothing was done yet"
    if (folder / TRAINED_FILE).is_file():
        return f"the trained weights stay in {folder / TRAINED}, and `{finish_command(folder)}` goes on from them"
    if (folder / RESULTS_FILE).is_file():
        return f"{folder} is ready" + (f"; `{publish_command(folder, *hub)}` uploads it" if hub[0] else "")
    if found := last_whole(folder):
        return f"the last checkpoint is {found}; --resume_from_checkpoint last goes on from there"
    return "there is no checkpoint yet; the same command begins again"


def main():
    # Answers may hold any character, whatever the terminal can show
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    logging.set_verbosity_error()
    # TRL's own defaults raise them
    warnings.simplefilter("ignore", FutureWarning)
    folder, hub = None, (None, False, None)
    with one_line_end(lambda: how_to_go_on(folder, hub)):
        words, kept = sys.argv[1:], None
        if words[:1] == ["finish"]:
            kept, words = take_up(words[1:])
        arguments, training, model_arguments = parse(words)
        # The trainer would upload every checkpoint by itself, with a card that is not right
        to_hub, training.push_to_hub = training.push_to_hub, False
        hub = (training.hub_model_id, bool(training.hub_private_repo), training.hub_revision)
        folder = Path(training.output_dir)
        if to_hub:
            check_repository(training.hub_model_id)
        is_new = not folder.exists()
        is_writer = PartialState().is_main_process and not arguments.dry_run
        try:
            with only_run(folder) if is_writer else contextlib.nullcontext():
                if kept:
                    finish(arguments, training, model_arguments, to_hub, kept)
                else:
                    fine_tune(arguments, training, model_arguments, to_hub, words)
                if to_hub and PartialState().is_main_process:
                    place = destination(*hub) if arguments.dry_run else publish(folder, *hub)
                    print(
                        f"would upload the finished folder to {place}" if arguments.dry_run else f"uploaded: {place}"
                    )
        finally:
            if is_new:
                # The trainer makes it before anything is known to be right
                with contextlib.suppress(OSError):
                    folder.rmdir()


if __name__ == "__main__":
    main()
