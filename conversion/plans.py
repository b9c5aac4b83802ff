"""What a command would do, in words, and the checks that need no weights."""

from dataclasses import asdict
from pathlib import Path

from model_cards.publish import destination
from modeling_bhyt import BHyTLlamaConfig

from .arguments import ExportArguments, GraftArguments, HealArguments
from .calibration import Basis
from .measuring import site_meter
from .rotation import HEAD
from .source import Source
from .tensors import output_dtype
from .texts import Texts


HEALING_SETTINGS = [
    "heal_tokens",
    "learning_rate",
    "heal_batch_size",
    "freeze_lambda",
    "target_lambda",
    "lambda_steps",
    "window_length",
    "seed",
]


def graft_bytes(source: Source, base: Source, dtype: str) -> int:
    """Size of the graft's weights: the source's in the output's dtype, and the head where it is untied."""
    stored = source.tensors["model.embed_tokens.weight"]
    growth = output_dtype(stored.dtype, dtype).itemsize / stored.dtype.itemsize
    head = stored.nbytes if base is not source and HEAD not in source.kept_names() else 0
    weights = source.num_bytes
    if source.quantization:
        weights = sum(tensor.nbytes for tensor in source.tensors.values())
    return int(growth * (weights + head))


def refuse_another_source(report: dict, source: Source, role: str):
    """Raises ValueError where `source` is not the checkpoint that the report speaks of."""
    stated = {file["sha256"] for file in report["source"]["files"].values()}
    given = {file["sha256"] for file in source.files.values()}
    if stated != given:
        raise ValueError(
            f"{role.upper()} {source.name} is not what this model was made from ({report['source']['name']}): "
            "the SHA-256 of their weight files differ"
        )


def unmeasured_sites(folder: Path, source: Source, config: BHyTLlamaConfig, basis: Basis) -> list[dict]:
    """A row for every site with what needs no text."""
    return [asdict(row) for row in site_meter(folder, source, config, basis).rows()]


def of_graft(arguments: GraftArguments, source: Source, config: BHyTLlamaConfig, texts: Texts) -> str:
    def words(numbers: list[float] | None) -> str:
        return "auto" if numbers is None else ", ".join(f"{number:g}" for number in numbers)

    exact = "auto" if arguments.exact_layers is None else ", ".join(map(str, arguments.exact_layers)) or "none"
    kept = "rotate" if arguments.basis == "rotated" else "copy"
    return (
        f"{_described(source)}\n"
        f"would {kept} {len(source.kept_names())} tensors and replace {len(source.norm_names)} norms (lambda "
        f"{words(arguments.lambdas['attention'])} and {words(arguments.lambdas['mlp'])}, kappa {config.kappa:g}), "
        f"estimating ({config.second_site_estimator}) in all layers but the exact ones ({exact}) of "
        f"{config.num_hidden_layers}\n" + _ending(arguments, source, texts)
    )


def of_heal(arguments: HealArguments, source: Source, texts: Texts) -> str:
    return (
        f"{_described(source)}\nwould train {arguments.train} of {arguments.model} for {arguments.num_heal_windows} "
        f"windows, {arguments.heal_batch_size} a step, on {texts.names['heal']}\n" + _ending(arguments, source, texts)
    )


def of_export(arguments: ExportArguments, source: Source, texts: Texts) -> str:
    return f"{_described(source)}\nwould write it as a plain Llama\n" + _ending(arguments, source, texts)


def _described(source: Source) -> str:
    notes = "".join(f"\nput right: {note}" for note in source.notes)
    return f"{source.name}: {len(source.tensors)} tensors, {source.num_bytes / 1e6:.1f} MB{notes}"


def _ending(arguments, source: Source, texts: Texts) -> str:
    used = "; ".join(f"{purpose}: {name}, {texts.count(purpose)} windows" for purpose, name in texts.names.items())
    push = ""
    if arguments.push_to_hub:
        place = destination(arguments.push_to_hub, arguments.private, arguments.revision)
        push = f"\nwould upload the finished folder to {place}"
    return (
        f"texts of {arguments.window_length} tokens a window: {used or 'none'}{push}\n"
        f"nothing was written to {arguments.output} (dry run)"
    )
