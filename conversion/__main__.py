"""python -m conversion graft|heal|export|verify: each a function that reads as prose."""

import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from checkpoints.command_line import Ended, deferred_signals, one_line_end
from checkpoints.resume import checkpoints
from checkpoints.settings import read_tokenizer
from evaluation.perplexity import perplexity
from model_cards.converted import save_converted_card
from model_cards.licence import settle_licence
from model_cards.publish import publish, publish_command
from modeling_bhyt import BHyTLlamaForCausalLM

from . import plans
from .arguments import (
    ExportArguments,
    GraftArguments,
    HealArguments,
    HealingArguments,
    MeasureArguments,
    OutputArguments,
    VerifyArguments,
    parse_command,
)
from .calibration import Basis, OriginalBasis
from .choice import MARGIN, candidates, choose, explain, first_choice, graft_of, measured_costs
from .delivery import check_place, save_whole
from .export import PlainTensors, fit_plain_gains, plain_config
from .graft import GraftedTensors, Sites, bhyt_config, fit_sites
from .heal import checkpoints_folder, heal_model, remove_checkpoints, resumed_checkpoint, trained_tensors
from .measuring import NATURAL_SHARE, Measurement, Verdict, examine, figures
from .report import save_report, save_windows, show, start_report, summary_rows, with_measurement
from .rotation import RotatedBasis, Rotation, check_rotation, rotate
from .saving import save_checkpoint, shard_bytes
from .source import Source, read_bhyt, read_source
from .texts import Texts
from .verify import differences, flatten, read_report, report_windows, show_differences


# How often auto chooses anew where a choice cost more on unseen text than predicted
MAX_CHOICES = 3


class BudgetMissed(Ended):
    """The result costs more than was allowed: nothing is saved."""


def graft(arguments: GraftArguments):
    """source -> rotate -> calibrate -> choose -> graft -> save -> compare what was saved with the source."""
    source = read_source(arguments.source, arguments.placement)
    source.licence = licence_of(source.licence, arguments)
    bases = both_bases(source, arguments.seed)
    basis = bases[arguments.basis]
    base = rotate(source, arguments.seed, arguments.dtype) if arguments.basis == "rotated" else source
    config = bhyt_config(base, arguments, **first_choice(arguments))
    check_place(arguments, plans.graft_bytes(source, base, arguments.dtype))
    if arguments.heal_tokens:
        resumed_checkpoint(arguments)
    texts = graft_texts(source, arguments)
    if arguments.dry_run:
        print(plans.of_graft(arguments, source, config, texts))
        return
    windows = texts.windows(arguments.seed)
    sites = Sites(source, base, arguments, candidates(arguments, config.num_hidden_layers))
    fit_sites(sites, bases, windows["calibration"])
    costs = measured_costs(sites, bases, windows["calibration"])
    sample = next((text for text in windows.values() if text is not None), None)
    rotation = (
        check_rotation(source, base, sample[0], arguments.seed)
        if basis.name == "rotated" and sample is not None
        else None
    )

    target = arguments.budget / NATURAL_SHARE
    with save_whole(arguments) as folder:
        for _ in range(MAX_CHOICES):
            choice = choose(costs, arguments, target)
            grafted = graft_of(choice, sites)
            tensors = GraftedTensors(base, grafted, arguments.dtype)
            save_checkpoint(
                folder, BHyTLlamaForCausalLM, grafted.config, tensors, source, shard_bytes(arguments, source)
            )
            measurement = examine(folder, source, basis, windows["report"], arguments)
            verdict = verdict_on(measurement, texts, arguments, choice.by_hand if arguments.is_auto else None)
            if verdict is None or verdict.passed or not arguments.is_auto:
                break
            assert verdict.allowed is not None
            print(f"rise of perplexity {verdict.sentence()}: choosing again")
            target *= MARGIN * verdict.allowed / verdict.rise
        report = start_report(
            arguments,
            source,
            texts.names,
            rotation=None if rotation is None else vars(rotation),
            choice=explain(choice, costs, arguments),
            exact_layers=[i for i in range(config.num_hidden_layers) if i not in grafted.config.estimated_layers],
        )
        if measurement is None:
            report["sites"] = plans.unmeasured_sites(folder, source, grafted.config, basis)
        report = with_measurement(report, measurement, windows["report"], verdict)
        if arguments.heal_tokens:
            report = heal_folder(folder, folder, source, basis, windows, texts, arguments, report)
        finish(folder, report, source, windows["report"], texts, arguments)
    deliver(report, arguments)


def heal(arguments: HealArguments):
    """teacher and graft -> distil -> save -> compare what was saved with the teacher."""
    student = read_bhyt(arguments.model)
    check_place(arguments, student.num_bytes)
    resumed_checkpoint(arguments)
    teacher = read_source(arguments.teacher, arguments.placement)
    # An older graft of a GGUF file may cut text in another way than its source is read today
    teacher.tokenizer = student.tokenizer
    report = read_report(arguments.model)
    # The card of the graft says most: a user may have corrected it
    known = student.licence if student.licence["license"] else report["source"]
    report["source"] |= licence_of(known, arguments)
    basis = both_bases(teacher, report["settings"]["seed"])[report["settings"]["basis"]]
    plans.refuse_another_source(report, teacher, "teacher")
    wanted = {
        "report": (arguments.report_text, arguments.num_report_windows),
        "heal": (arguments.heal_text, arguments.num_heal_windows),
    }
    texts = Texts(teacher, arguments.window_length, wanted)
    if arguments.dry_run:
        print(plans.of_heal(arguments, teacher, texts))
        return
    windows = texts.windows(arguments.seed)
    with save_whole(arguments) as folder:
        before = examine(Path(arguments.model), teacher, basis, windows["report"], arguments)
        report = with_measurement(report, before, windows["report"])
        report = heal_folder(Path(arguments.model), folder, teacher, basis, windows, texts, arguments, report)
        finish(folder, report, teacher, windows["report"], texts, arguments)
    deliver(report, arguments)


def heal_folder(
    start: Path,
    folder: Path,
    teacher: Source,
    basis: Basis,
    windows: dict[str, Tensor | None],
    texts: Texts,
    arguments: HealingArguments,
    report: dict,
) -> dict:
    """Heals the checkpoint in `start`, saves it in `folder`, and gives the report that says so."""
    assert windows["heal"] is not None
    stored = BHyTLlamaForCausalLM.config_class.from_pretrained(start)
    model = heal_model(start, teacher.model, windows["heal"], arguments)
    tensors = trained_tensors(model, start)
    save_checkpoint(folder, BHyTLlamaForCausalLM, stored, tensors, teacher, shard_bytes(arguments, teacher))
    measurement = examine(folder, teacher, basis, windows["report"], arguments)
    verdict = verdict_on(measurement, texts, arguments, by_hand=0.0)
    healing = {
        "train": arguments.train,
        "num_tokens": windows["heal"].numel(),
        "text": texts.names["heal"],
        "settings": {name: getattr(arguments, name) for name in plans.HEALING_SETTINGS},
        "before": {name: report[name] for name in ("perplexity", "kl_nats_per_token")}
        if report["perplexity"]
        else None,
    }
    report = report | {"healing": healing, "texts": report["texts"] | texts.names}
    return with_measurement(report, measurement, windows["report"], verdict)


def export(arguments: ExportArguments):
    """BHyT model -> refit plain gains -> save a Llama -> compare what was saved with the model."""
    source = read_bhyt(arguments.model, arguments.placement)
    source.licence = licence_of(source.licence, arguments)
    config = plain_config(source)
    check_place(arguments, source.num_bytes)
    report_text = arguments.report_text or arguments.calibration_text
    wanted = {
        "calibration": (arguments.calibration_text, arguments.num_calibration_windows),
        "report": (report_text, arguments.num_report_windows),
    }
    texts = Texts(source, arguments.window_length, wanted)
    if arguments.dry_run:
        print(plans.of_export(arguments, source, texts))
        return
    windows = texts.windows(arguments.seed)
    gains = fit_plain_gains(source, windows["calibration"], arguments.batch_size)
    with save_whole(arguments) as folder:
        tensors = PlainTensors(source, gains)
        save_checkpoint(folder, LlamaForCausalLM, config, tensors, source, shard_bytes(arguments, source))
        measurement = examine(folder, source, None, windows["report"], arguments)
        verdict = verdict_on(measurement, texts, arguments, by_hand=0.0)
        report = start_report(arguments, source, texts.names, tensors=tensors.account())
        report = with_measurement(report, measurement, windows["report"], verdict)
        finish(folder, report, source, windows["report"], texts, arguments)
    deliver(report, arguments)


def verify(arguments: VerifyArguments) -> int:
    """report -> the same text -> the same measurement -> where the figures differ. Returns the exit code."""
    folder = Path(arguments.model)
    report = read_report(arguments.model)
    stated = {name: report[name] for name in ("perplexity", "kl_nats_per_token", "sites", "layers")}
    if stated["perplexity"] is None:
        raise ValueError(f"the report of {folder} was not measured: there is nothing to verify")
    exported = report["command"] == "export"
    if arguments.source is None:
        alone = read_bhyt(arguments.model, arguments.placement) if not exported else read_source(arguments.model)
        windows = report_windows(folder, report, alone, arguments.report_text)
        stated = {"perplexity": {"model": stated["perplexity"]["model"]}}
        recomputed = {"perplexity": {"model": perplexity(alone.model, windows, arguments.batch_size).perplexity}}
    else:
        source = (read_bhyt if exported else read_source)(arguments.source, arguments.placement)
        plans.refuse_another_source(report, source, "source")
        source.tokenizer = read_tokenizer(folder)
        settings = report["settings"]
        basis = None if exported else both_bases(source, settings["seed"])[settings["basis"]]
        windows = report_windows(folder, report, source, arguments.report_text)
        recomputed = figures(examine(folder, source, basis, windows, arguments))
    for name in (stated, recomputed):
        name["perplexity"].pop("windows_sha256", None)
    recomputed = {name: recomputed[name] for name in stated}
    found = differences(stated, recomputed)
    show_differences(found, len(flatten(stated)))
    return 1 if found else 0


def licence_of(known: dict, arguments: OutputArguments) -> dict[str, str | None]:
    """Under which licence the result will stand; refused where that is unknown and it is to be uploaded."""
    return settle_licence(known, arguments.license, Path(arguments.output), arguments.push_to_hub is not None)


def verdict_on(
    measurement: Measurement | None, texts: Texts, arguments: OutputArguments, by_hand: float | None
) -> Verdict | None:
    """None where nothing was measured; `by_hand` as in Verdict.of."""
    if measurement is None:
        return None
    return Verdict.of(measurement.comparison, texts.is_sampled("report"), arguments.budget, by_hand)


def both_bases(source: Source, seed: int) -> dict[str, Basis]:
    rotation = Rotation(source.config.hidden_size, seed)
    return {basis.name: basis for basis in (OriginalBasis(), RotatedBasis(rotation))}


def graft_texts(source: Source, arguments: GraftArguments) -> Texts:
    wanted = {
        "calibration": (arguments.calibration_text, arguments.num_calibration_windows),
        "report": (arguments.report_text or arguments.calibration_text, arguments.num_report_windows),
        "heal": (arguments.heal_text, arguments.num_heal_windows),
    }
    return Texts(source, arguments.window_length, wanted)


def finish(
    folder: Path, report: dict, source: Source, held_out: Tensor | None, texts: Texts, arguments: OutputArguments
):
    """Report, text and card of a finished checkpoint; refused where it costs more than was allowed.

    Raises:
        BudgetMissed: with what to do about it.
    """
    report["protocol"] = None if held_out is None else texts.protocol("report", held_out)
    verdict = report["verdict"]
    if verdict is not None and not verdict["passed"] and not arguments.force:
        show(report, "Not saved")
        raise BudgetMissed(
            f"rise of perplexity {verdict['sentence']}: nothing was saved; give a larger --budget, heal it "
            "(--heal_tokens), or save it all the same with --force"
        )
    if held_out is not None and texts.is_sampled("report"):
        save_windows(folder, held_out)
    save_converted_card(folder, report, summary_rows(report), source.hub_id, Path(arguments.output))
    save_report(folder, report)


def deliver(report: dict, arguments: OutputArguments):
    """Says what was made, and uploads it where that was asked for."""
    show(report, f"{arguments.command()} of {report['source']['name']}")
    consent = "" if arguments.command() == "export" else ", trust_remote_code=True"
    if isinstance(arguments, HealingArguments) and arguments.heal_tokens:
        with deferred_signals():
            remove_checkpoints(arguments)
    print(f"{arguments.output} is ready: AutoModelForCausalLM.from_pretrained({arguments.output!r}{consent})")
    if arguments.push_to_hub:
        print(f"uploaded: {publish(*upload(arguments))}")


def upload(arguments: OutputArguments) -> tuple[Path, str, bool, str | None]:
    """What publish takes."""
    assert arguments.push_to_hub
    return Path(arguments.output), arguments.push_to_hub, arguments.private, arguments.revision


RUN = {GraftArguments: graft, HealArguments: heal, ExportArguments: export, VerifyArguments: verify}


def how_to_go_on(arguments: MeasureArguments | None) -> str:
    """After a signal: what stands, and what goes on from there."""
    if isinstance(arguments, OutputArguments) and arguments.is_delivered:
        again = f"; `{publish_command(*upload(arguments))}` uploads it" if arguments.push_to_hub else ""
        return f"{arguments.output} is ready{again}"
    if not isinstance(arguments, HealingArguments) or not arguments.heal_tokens:
        return "nothing was written"
    found = checkpoints(checkpoints_folder(arguments))
    return "nothing was written" + (f"; --resume goes on from {found[-1]}" if found else "")


def main():
    arguments = None
    with one_line_end(lambda: how_to_go_on(arguments)):
        arguments = parse_command(sys.argv[1:])
        sys.exit(RUN[type(arguments)](arguments) or 0)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
