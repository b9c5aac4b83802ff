"""python -m sft: data -> SFTTrainer -> evaluation before and after -> card -> Hub."""

import contextlib
import io
import json
import shutil
import sys
import time
import warnings
from pathlib import Path

from accelerate.state import PartialState
from transformers.utils import logging
from trl import ModelConfig, SFTConfig

from checkpoints.command_line import Ended, one_line_end
from checkpoints.resume import last_whole
from model_cards.fine_tuned import save_fine_tuned_card
from model_cards.licence import read_licence, settle_licence
from model_cards.publish import check_repository, destination, publish, publish_command

from .arguments import ChatArguments, parse
from .base import adapter_config, check_ties, freeze_constants, load_model, read_base
from .chat import Tokenized, choose_chat, tokenize
from .data import Conversations, read_conversations
from .norm_callbacks import NormStatistics, RefreshConstants
from .proof import Proof, text_of_proof
from .results import gather_results, result_rows
from .saving import (
    BEFORE_FILE,
    RESULTS_FILE,
    check_place,
    describe_run,
    save_finished,
    save_json,
    start_run,
)
from .summary import show, summary_rows
from .trainer import ChatTrainer, LogFiles, NotFinite, StopWhenAsked


class Stopped(Ended):
    """The run was asked to stop by a signal, and left a checkpoint to resume from."""

    def __init__(self, step: int, number: int):
        super().__init__(f"stopped after step {step}: go on with --resume_from_checkpoint last")
        self.code = 128 + number


def fine_tune(arguments: ChatArguments, training: SFTConfig, model_arguments: ModelConfig, to_push: bool = False):
    """base, data -> chat -> trainer -> figures before -> train -> save -> figures after -> card -> Hub."""
    check_place(training, arguments, str(model_arguments.model_name_or_path))
    folder = Path(training.output_dir)
    base = read_base(model_arguments, training)
    base.licence = settle_licence(read_licence(base.folder), arguments.license, folder, to_push)
    windows = text_of_proof(arguments, base.tokenizer)
    chat = choose_chat(base.tokenizer, training.chat_template_path)
    # The trainer would read the file again, and over what was made of it; one without .jinja it takes for a Hub id
    training.chat_template_path = None
    texts = read_texts(arguments, training, chat)
    _, _, rows = texts[0]
    questions = texts[1][2].dataset if len(texts) > 1 else None
    trainer = make_trainer(base, chat, rows, questions, arguments, training, model_arguments)
    summary = summary_rows(base, chat, trainer, texts)
    proof = Proof(
        windows,
        questions,
        arguments.questions,
        arguments.max_answer_tokens,
        chat,
        training.per_device_eval_batch_size,
        bool(training.bf16),
    )
    digest = proof.digest(base)
    known = known_figures(arguments.figures_before, digest)
    state = PartialState()
    if state.is_main_process:
        show(summary, "Fine-tuning")
    if arguments.dry_run:
        if state.is_main_process:
            print("dry run: nothing was trained, nothing was written")
        return
    with state.main_process_first():
        start_run(training, arguments, describe_run(arguments, training, model_arguments, base, rows.dataset))
    before = figures_before(folder / BEFORE_FILE, digest, proof, trainer, known)
    started = time.monotonic()
    train(trainer, training)
    minutes = (time.monotonic() - started) / 60

    unfinished = folder / ".unfinished"
    trainer.save_model(str(unfinished))
    state.wait_for_everyone()
    if not state.is_main_process:
        return
    finished = save_finished(unfinished, folder, base, chat, arguments)
    after = proof.measure(finished)
    settings = (arguments, training, model_arguments)
    results = gather_results(base, chat, texts, summary, settings, trainer.state, (before, after), minutes)
    save_json(folder / RESULTS_FILE, results)
    compared = result_rows(results)
    save_fine_tuned_card(folder, results, compared)
    if compared:
        show(compared, "What it did", ("", "before", "after", "change"))
    print(f"{folder} is ready: AutoModelForCausalLM.from_pretrained({str(folder)!r}, trust_remote_code=True)")


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


def make_trainer(base, chat, rows: Tokenized, questions, arguments, training, model_arguments) -> ChatTrainer:
    model = load_model(base, chat, model_arguments)
    try:
        trainer = ChatTrainer(
            model,
            training,
            train_dataset=rows.dataset,
            eval_dataset=questions if training.eval_strategy != "no" else None,
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


def train(trainer: ChatTrainer, training: SFTConfig):
    """Trains to the end.

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
        raise Stopped(trainer.state.global_step, stop.stopped_by)


def how_to_go_on(folder: Path | None, hub: tuple) -> str:
    """After a signal: what stands in the folder, and what goes on from there."""
    if folder is None:
        return "nothing was done yet"
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
        arguments, training, model_arguments = parse(sys.argv[1:])
        # The trainer would upload every checkpoint by itself, with a card that is not right
        to_hub, training.push_to_hub = training.push_to_hub, False
        hub = (training.hub_model_id, bool(training.hub_private_repo), training.hub_revision)
        folder = Path(training.output_dir)
        is_new = not folder.exists()
        try:
            if to_hub:
                check_repository(training.hub_model_id)
            fine_tune(arguments, training, model_arguments, to_hub)
            if to_hub and PartialState().is_main_process:
                place = destination(*hub) if arguments.dry_run else publish(folder, *hub)
                print(f"would upload the finished folder to {place}" if arguments.dry_run else f"uploaded: {place}")
        except NotFinite as broken:
            raise NotFinite(
                f"{broken}: the run stopped before it, and saved nothing of it; take a smaller learning_rate"
            ) from broken
        finally:
            shutil.rmtree(folder / ".finished", ignore_errors=True)
            if is_new:
                # The trainer makes it before anything is known to be right
                with contextlib.suppress(OSError):
                    folder.rmdir()


if __name__ == "__main__":
    main()
