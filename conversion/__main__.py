"""python -m conversion graft SOURCE OUTPUT"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from evaluation.perplexity import read_documents, text_windows
from model_cards.render import save_card
from modeling_bhyt import BHyTLlamaForCausalLM

from .arguments import GraftArguments, command_and_arguments, fail, parse_graft_arguments
from .calibration import sample_windows
from .graft import Graft, assemble, bhyt_config, fit_graft, grafted_tensors
from .report import measure, report_of, save_report, show, summary_rows
from .source import Source, read_source


def graft(arguments: GraftArguments):
    """source -> calibrate -> graft -> save -> load what was saved -> compare with the source."""
    output = Path(arguments.output)
    if output.exists() and not arguments.overwrite:
        raise ValueError(f"OUTPUT {output} exists: choose another folder, or replace it with --overwrite")
    source = read_source(arguments.source)
    config = bhyt_config(source, arguments)
    if arguments.dry_run:
        print(plan(arguments, source, config))
        return
    calibration, held_out, texts = choose_texts(arguments, source)
    fitted = fit_graft(source, config, calibration, arguments)
    with save_whole(output) as folder:
        save_checkpoint(folder, source, fitted, arguments.dtype)
        model = BHyTLlamaForCausalLM.from_pretrained(folder, dtype="auto")
        comparison, sites = measure(source, fitted, model, held_out, arguments.batch_size)
        report = report_of(arguments, source, fitted, texts, comparison, sites)
        save_report(folder, report)
        save_card(folder, report, summary_rows(report), source.hub_id)
    show(report)
    print(f"{output} is ready: AutoModelForCausalLM.from_pretrained({str(output)!r}, trust_remote_code=True)")


def plan(arguments: GraftArguments, source: Source, config) -> str:
    text = arguments.calibration_text or "text sampled from the source"
    return (
        f"{source.name}: {len(source.tensors)} tensors, {sum(file['bytes'] for file in source.files.values()) / 1e6:.1f} MB\n"
        f"would copy {len(source.tensors) - len(source.norm_names)} tensors and replace {len(source.norm_names)} norms "
        f"(lambda {arguments.attention_lambda} and {arguments.mlp_lambda}, kappa {config.kappa:g}), estimating "
        f"({config.second_site_estimator}) in {len(config.estimated_layers)} of {config.num_hidden_layers} layers\n"
        f"would calibrate on {arguments.num_calibration_windows} windows of {arguments.window_length} tokens of {text} "
        f"and measure on {arguments.num_report_windows} others\n"
        f"nothing was written to {arguments.output} (dry run)"
    )


def choose_texts(arguments: GraftArguments, source: Source) -> tuple[Tensor, Tensor, dict[str, str]]:
    """(calibration windows, held-out windows, what they are); the source writes both where no file was named."""
    num_calibration, num_report = arguments.num_calibration_windows, arguments.num_report_windows
    length, tokenizer = arguments.window_length, source.tokenizer
    if length > source.config.max_position_embeddings:
        raise ValueError(
            f"window_length is {length}, but the source has {source.config.max_position_embeddings} positions: "
            f"give --window_length {source.config.max_position_embeddings}"
        )

    def windows(text: str | None, num_windows: int) -> Tensor:
        if text is None:
            return sample_windows(source.model, tokenizer, num_windows, length, arguments.seed)
        return text_windows(tokenizer, read_documents(text), length, num_windows)

    def name(text: str | None) -> str:
        return "text sampled from the source" if text is None else Path(text).name

    if arguments.report_text is None:
        both = windows(arguments.calibration_text, num_calibration + num_report)
        calibration, held_out = both.split([num_calibration, num_report])
        shared = name(arguments.calibration_text)
        return calibration, held_out, {"calibration": shared, "report": f"{shared}, another part"}
    held_out = windows(arguments.report_text, num_report)
    calibration = windows(arguments.calibration_text, num_calibration)
    texts = {"calibration": name(arguments.calibration_text), "report": name(arguments.report_text)}
    return calibration, held_out, texts


@contextmanager
def save_whole(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its place when the block ends, and vanishes where it fails."""
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        fresh = staging / "new"
        fresh.mkdir()
        yield fresh
        if output.exists():
            output.rename(staging / "old")
        fresh.rename(output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def save_checkpoint(folder: Path, source: Source, fitted: Graft, dtype: str):
    """Weights, configuration, code, tokenizer, chat template and generation settings."""
    model = assemble(fitted.config, grafted_tensors(source, fitted, dtype))
    if source.generation_config is not None:
        model.generation_config = source.generation_config
    model.save_pretrained(folder)
    source.tokenizer.save_pretrained(folder)


def main():
    command, arguments = command_and_arguments()
    if command != "graft":
        fail(f"unknown command {command!r}: python -m conversion --help lists them")
    try:
        graft(parse_graft_arguments(arguments))
    except StrictDataclassError as error:
        fail(str(error).splitlines()[-1].strip().removeprefix("ValueError: "))
    except (ValueError, OSError) as error:
        fail(" ".join(str(error).split()))
    except KeyboardInterrupt:
        fail("interrupted: nothing was written", code=130)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
