"""python -m conversion graft SOURCE OUTPUT"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError

from model_cards.render import save_card
from modeling_bhyt import BHyTLlamaConfig, BHyTLlamaForCausalLM

from .arguments import GraftArguments, command_and_arguments, fail, parse_graft_arguments
from .graft import Graft, assemble, bhyt_config, fit_graft, grafted_tensors
from .report import measure, report_of, save_report, show, summary_rows
from .source import Source, read_source
from .texts import Texts


def graft(arguments: GraftArguments):
    """source -> calibrate -> graft -> save -> load what was saved -> compare with the source."""
    output = Path(arguments.output)
    if output.exists() and not arguments.overwrite:
        raise ValueError(f"OUTPUT {output} exists: choose another folder, or replace it with --overwrite")
    place = next(folder for folder in output.absolute().parents if folder.exists())
    if not os.access(place, os.W_OK):
        raise ValueError(f"OUTPUT {output} cannot be made: {place} is not writable")
    source = read_source(arguments.source)
    config = bhyt_config(source, arguments)
    texts = Texts(arguments, source)
    if arguments.dry_run:
        print(plan(arguments, source, config, texts))
        return
    calibration, held_out = texts.windows()
    fitted = fit_graft(source, config, calibration, arguments)
    with save_whole(output, arguments.overwrite) as folder:
        save_checkpoint(folder, source, fitted, arguments.dtype)
        model = BHyTLlamaForCausalLM.from_pretrained(folder, dtype="auto")
        comparison, sites = measure(source, fitted, model, held_out, arguments.batch_size)
        report = report_of(arguments, source, fitted, texts.names, comparison, sites)
        save_report(folder, report)
        save_card(folder, report, summary_rows(report), source.hub_id)
    show(report)
    print(f"{output} is ready: AutoModelForCausalLM.from_pretrained({str(output)!r}, trust_remote_code=True)")


def plan(arguments: GraftArguments, source: Source, config: BHyTLlamaConfig, texts: Texts) -> str:
    counts = source.count_tensors()
    return (
        f"{source.name}: {len(source.tensors)} tensors, {sum(f['bytes'] for f in source.files.values()) / 1e6:.1f} MB\n"
        f"would copy {counts['copied']} tensors and replace {counts['replaced']} norms "
        f"(lambda {arguments.attention_lambda} and {arguments.mlp_lambda}, kappa {config.kappa:g}), estimating "
        f"({config.second_site_estimator}) in {len(config.estimated_layers)} of {config.num_hidden_layers} layers\n"
        f"would calibrate on {texts.names['calibration']} ({arguments.num_calibration_windows} windows of "
        f"{arguments.window_length} tokens) and measure on {texts.names['report']} "
        f"({arguments.num_report_windows} windows)\n"
        f"nothing was written to {arguments.output} (dry run)"
    )


@contextmanager
def save_whole(output: Path, overwrite: bool) -> Iterator[Path]:
    """A folder beside `output` that takes its place when the block ends, and vanishes where it fails."""
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        fresh = staging / "new"
        fresh.mkdir()
        yield fresh
        if output.exists():
            if not overwrite:
                raise ValueError(f"OUTPUT {output} appeared meanwhile: choose another folder, or add --overwrite")
            output.rename(staging / "old")
        try:
            fresh.rename(output)
        except BaseException:
            if (staging / "old").exists():
                (staging / "old").rename(output)
            raise
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
