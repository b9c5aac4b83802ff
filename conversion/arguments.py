"""Arguments of `python -m conversion`: one data class a command; the flag is the field is the YAML key."""

import math
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar, TypeVar, get_type_hints

import yaml
from transformers import HfArgumentParser

from checkpoints.command_line import OneLineErrors, fail
from checkpoints.names import at_home
from model_cards.licence import check_flag
from model_cards.publish import check_repository


DTYPES = ("auto", "float32", "bfloat16", "float16")
ESTIMATORS = ("fitted", "uniform_attention", "published", "exact")
BASES = ("rotated", "original")
TRAINABLE = ("norms", "lora", "all")
AUTO = "auto"
PATHS = ("source", "model", "teacher", "output", "calibration_text", "report_text", "heal_text")


# Whole numbers may be as small as this; other numbers must be larger
LEAST = {
    "num_report_tokens": 0,
    "window_length": 8,
    "batch_size": 1,
    "seed": 0,
    "budget": 0.0,
    "heal_tokens": 0,
    "learning_rate": 0.0,
    "heal_batch_size": 1,
    "lambda_steps": 1,
    "save_steps": 1,
    "kappa": 0.0,
    "num_calibration_tokens": 0,
}


def _option(default, text: str, choices=None):
    """A field with its help text and what it may be."""
    metadata = {"help": text} | ({"choices": choices} if choices else {})
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class MeasureArguments:
    """What every command that runs a model asks for."""

    places: ClassVar[tuple[str, ...]] = ()

    config: str | None = _option(None, "A YAML file with any of these; flags override it.")
    report_text: str | None = _option(
        None,
        "A text file, or JSONL with `text`, to measure on; FILE[a:b] takes documents a to b. Default: a part of the "
        "calibration text that calibration did not see, or text sampled from the source model itself.",
    )
    num_report_tokens: int = _option(4096, "Tokens to measure the result on; 0 measures nothing.")
    window_length: int = _option(512, "Tokens a window.")
    batch_size: int = _option(4, "Windows at a time. Changes speed and memory only.")
    seed: int = _option(0, "Seed of the sampled text, of the rotation and of training.")
    max_memory: list[str] = _option(
        [], "What each device may hold, as in 0=20GiB cpu=60GiB; weights beyond it are read from disk when needed."
    )

    def __post_init__(self):
        hints = get_type_hints(type(self))
        for option in fields(self):
            self._check(option, hints[option.name])
        for name in PATHS:
            if given := getattr(self, name, None):
                setattr(self, name, at_home(given))
        for name in self.places:
            if not getattr(self, name):
                raise ValueError(f"{name.upper()} is missing: {self.usage()}")
        # The same memory map as accelerate takes: numbers are accelerators
        given = self.max_memory if isinstance(self.max_memory, list) else [self.max_memory]
        pairs = [str(pair).partition("=") for pair in given]
        if bad := [device + sign + size for device, sign, size in pairs if not (device and size)]:
            raise ValueError(f"max_memory names {bad[0]!r}: give a device and a size, as in cpu=60GiB")
        memory = {int(device) if device.isdecimal() else device: size for device, _, size in pairs}
        self.placement = {"device_map": "auto"} | ({"max_memory": memory} if memory else {})

    def _check(self, option, hint):
        name, value, least = option.name, getattr(self, option.name), LEAST.get(option.name)
        if (choices := option.metadata.get("choices")) and value not in choices:
            raise ValueError(f"{name} is {value!r}: choose from {', '.join(choices)}")
        # A YAML file may hold any type
        is_text = isinstance(value, str) or (value is None and hint == str | None)
        if hint in (str, str | None) and not is_text:
            raise ValueError(f"{name} is {value!r}: give a name")
        if hint is bool and not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}: give true or false")
        if hint is int and (isinstance(value, bool) or not isinstance(value, int) or value < least):
            raise ValueError(f"{name} is {value!r}: give a whole number of at least {least}")
        if hint is float and not _is_number(value, above=least):
            raise ValueError(f"{name} is {value!r}: give a finite number above {least}")

    @classmethod
    def command(cls) -> str:
        return cls.__name__.removesuffix("Arguments").lower()

    @classmethod
    def usage(cls) -> str:
        return f"python -m conversion {cls.command()} {' '.join(place.upper() for place in cls.places)}"

    @property
    def num_report_windows(self) -> int:
        return math.ceil(self.num_report_tokens / self.window_length)


@dataclass
class OutputArguments(MeasureArguments):
    """What every command that makes a checkpoint asks for besides."""

    output: str = _option("", "The folder to make.")
    budget: float = _option(0.005, "Allowed rise of perplexity on the report's text: 0.005 is half a percent.")
    force: bool = _option(False, "Save even where the budget was missed.")
    overwrite: bool = _option(False, "Replace OUTPUT if it exists and holds only what these commands wrote.")
    dry_run: bool = _option(False, "Check everything, say what would be done, write nothing.")
    max_shard_size: str = _option(AUTO, "Size of a weight file at most, as in 5GB; auto: like the source's largest.")
    push_to_hub: str | None = _option(None, "A Hub id to upload the finished folder to, as in name/model.")
    license: str | None = _option(
        None,
        "The licence of the result, as the Hub calls it; default: the source's, as its card says. push_to_hub needs one "
        "(`unknown` if nobody knows).",
    )
    private: bool = _option(False, "Make the Hub repository private.")
    revision: str | None = _option(None, "The branch of the Hub repository to upload to.")

    def __post_init__(self):
        super().__post_init__()
        check_flag(self.license)
        if self.push_to_hub is not None:
            check_repository(self.push_to_hub)
        elif self.private or self.revision is not None:
            raise ValueError("private and revision are about an upload: give --push_to_hub name/model too")
        # A slash at its end would put OUTPUT.checkpoints into it
        self.output = str(Path(self.output))
        # Set when the finished folder stands there
        self.is_delivered = False
        output = Path(os.path.realpath(self.output))
        for name in ("source", "model", "teacher"):
            given = getattr(self, name, None)
            if given and Path(given).exists():
                place = Path(given).resolve()
                if output == place or output in place.parents or place in output.parents:
                    raise ValueError(
                        f"OUTPUT {self.output} and {name.upper()} {given} hold each other: choose another folder"
                    )


@dataclass
class HealingArguments(OutputArguments):
    """How a graft is healed, as a command of its own and as the end of `graft`."""

    heal_tokens: int = _option(0, "Tokens to distil the source's logits on; 0 trains nothing.")
    heal_text: str | None = _option(None, "The text to heal on. Default: text sampled from the source model.")
    train: str = _option("norms", "What to train: gamma, lambda, r and c; LoRA besides; or all weights.", TRAINABLE)
    learning_rate: float = _option(0.002, "Peak learning rate.")
    heal_batch_size: int = _option(4, "Windows a step.")
    freeze_lambda: bool = _option(False, "Leave lambda as it is.")
    target_lambda: float | None = _option(None, "Raise lambda to this at every site, in steps, while training.")
    lambda_steps: int = _option(8, "The number of these steps, spread over the first half of training.")
    save_steps: int = _option(20, "Training steps between two checkpoints to resume from.")
    resume: bool = _option(False, "Go on from the last checkpoint of a run that was stopped.")

    def __post_init__(self):
        super().__post_init__()
        if self.target_lambda is not None and not _is_number(self.target_lambda, above=0):
            raise ValueError(f"target_lambda is {self.target_lambda!r}: give a finite number above 0")

    @property
    def num_heal_windows(self) -> int:
        return math.ceil(self.heal_tokens / self.window_length)


@dataclass
class GraftArguments(HealingArguments):
    """Grafts BHyT into a Llama checkpoint: python -m conversion graft SOURCE OUTPUT [--flags]

    Left alone, every choice is made for you: lambda at each site and the layers with an exact second statistic are
    chosen so that perplexity rises by no more than the budget.
    """

    places: ClassVar[tuple[str, ...]] = ("source", "output")

    source: str = _option("", "A folder with a safetensors checkpoint, a .gguf file, or a Hub id.")
    basis: str = _option(
        "rotated",
        "rotated: gains folded and the residual stream rotated, so that lambda of 1 and more costs little; original: "
        "every other weight stays bit-identical and embeddings tied, at a small lambda.",
        BASES,
    )
    attention_lambda: list[str] = _option(
        [AUTO], "lambda before the attention: auto, a number, or one a layer. Smaller is nearer to the source."
    )
    mlp_lambda: list[str] = _option([AUTO], "lambda before the MLP: auto, a number, or one a layer.")
    kappa: float = _option(10.0, "How many standard deviations stay inside the bound.")
    variance_estimator: str = _option(
        "fitted",
        "Where the second site's mean square comes from: r and c fitted to text, a constant computed from the weights "
        "(uniform_attention, published), or a reduction (exact).",
        ESTIMATORS,
    )
    exact_variance_layers: list[str] = _option(
        [AUTO],
        "Layers that reduce at the second site all the same, as in 0,24; none; or auto: as few as the budget allows "
        "(none where the estimator is not fitted).",
    )
    calibration_text: str | None = _option(
        None,
        "A text file, or JSONL with `text`; FILE[a:b] takes documents a to b. Default: text sampled from the source "
        "model itself.",
    )
    num_calibration_tokens: int = _option(4096, "Tokens to calibrate on; 0 keeps the limit gains.")
    dtype: str = _option(AUTO, "dtype to save; auto is the source's, float32 for GGUF.", DTYPES)

    def __post_init__(self):
        super().__post_init__()
        self.lambdas = {"attention": _numbers(self, "attention_lambda"), "mlp": _numbers(self, "mlp_lambda")}
        self.exact_layers = _layer_indices(self.exact_variance_layers)
        if self.exact_layers is None and self.variance_estimator != "fitted":
            self.exact_layers = []
        if not self.num_calibration_tokens:
            free = [name for name, numbers in self.lambdas.items() if numbers is None]
            if free or self.exact_layers is None or self.variance_estimator == "fitted":
                raise ValueError(
                    "num_calibration_tokens is 0: give numbers for attention_lambda and mlp_lambda, and a "
                    "variance_estimator that needs no text (uniform_attention, published, exact)"
                )

    @property
    def is_auto(self) -> bool:
        """Whether anything is left to be chosen."""
        return self.exact_layers is None or None in self.lambdas.values()

    @property
    def num_calibration_windows(self) -> int:
        return math.ceil(self.num_calibration_tokens / self.window_length)


@dataclass
class HealArguments(HealingArguments):
    """Distils the source's logits into a grafted model: python -m conversion heal MODEL OUTPUT --teacher SOURCE"""

    places: ClassVar[tuple[str, ...]] = ("model", "output", "teacher")

    model: str = _option("", "The folder of a BHyT checkpoint.")
    teacher: str = _option("", "The checkpoint that it was grafted from.")

    def __post_init__(self):
        super().__post_init__()
        if not self.heal_tokens:
            raise ValueError("heal_tokens is 0: say how many tokens to train on, as in --heal_tokens 100000")


@dataclass
class ExportArguments(OutputArguments):
    """Makes a plain Llama checkpoint of a BHyT one: python -m conversion export MODEL OUTPUT [--flags]"""

    places: ClassVar[tuple[str, ...]] = ("model", "output")

    model: str = _option("", "The folder of a BHyT checkpoint (bhyt, bhyt_star, lns or rmsnorm).")
    calibration_text: str | None = _option(
        None, "The text that gains are refitted on. Default: text sampled from the model itself."
    )
    num_calibration_tokens: int = _option(4096, "Tokens to refit the gains on.")

    def __post_init__(self):
        super().__post_init__()
        if not self.num_calibration_tokens:
            raise ValueError("num_calibration_tokens is 0: gains cannot be refitted without text")

    @property
    def num_calibration_windows(self) -> int:
        return math.ceil(self.num_calibration_tokens / self.window_length)


@dataclass
class VerifyArguments(MeasureArguments):
    """Recomputes the figures of a checkpoint's report: python -m conversion verify MODEL [--source SOURCE]"""

    places: ClassVar[tuple[str, ...]] = ("model",)

    model: str = _option("", "The folder of a grafted, healed or exported checkpoint.")
    source: str | None = _option(None, "What it was made from. Without it, what needs the source is left out.")


COMMANDS = {kind.command(): kind for kind in (GraftArguments, HealArguments, ExportArguments, VerifyArguments)}
Arguments = TypeVar("Arguments", bound=MeasureArguments)


def _is_number(value, above: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and above < value < math.inf


def _numbers(arguments: GraftArguments, name: str) -> list[float] | None:
    """Numbers of a lambda option; None for auto."""
    given = getattr(arguments, name)
    words = given if isinstance(given, list) else [given]
    if words == [AUTO]:
        return None
    numbers = []
    for word in words:
        try:
            number = float("nan") if isinstance(word, bool) else float(word)
        except (TypeError, ValueError):
            number = float("nan")
        if not _is_number(number, above=0):
            raise ValueError(f"{name} is {word!r}: give auto, or a finite number above 0")
        numbers.append(number)
    return numbers


def _layer_indices(layers) -> list[int] | None:
    """[0, 24], ["0", "24"] and ["0,24"] all mean layers 0 and 24; None means auto."""
    parts = layers if isinstance(layers, list) else [layers]
    words = [word for part in parts for word in str(part).replace(",", " ").split()]
    if words == [AUTO]:
        return None
    if words == ["none"]:
        return []
    if bad := [word for word in words if not word.isdecimal()]:
        raise ValueError(
            f"exact_variance_layers names {bad[0]!r}: give auto, none or layer numbers from 0, as in 0,24"
        )
    return sorted({int(word) for word in words})


class OneLineParser(OneLineErrors, HfArgumentParser):
    pass


def parse(kind: type[Arguments], words: list[str]) -> Arguments:
    """Flags over the YAML of `--config` over the defaults. Exits with 2 and one line on any bad input."""
    command = f"python -m conversion {kind.command()}"
    parser = OneLineParser(kind, prog=command, description=kind.__doc__, allow_abbrev=False)
    metavar = " ".join(place.upper() for place in kind.places)
    parser.add_argument("given_places", nargs="*", metavar=metavar, help="the same as the flags of these names")
    early, unknown = parser.parse_known_args(words)
    extra = early.given_places[len(kind.places) :]
    if unknown or extra:
        parser.error(f"unknown argument {(unknown or extra)[0]!r}: see {command} --help")
    defaults = _read_yaml(early.config, kind) if early.config else {}
    parser.set_defaults(**defaults | dict(zip(kind.places, early.given_places)))
    try:
        return parser.parse_args_into_dataclasses(words)[0]
    except ValueError as error:
        fail(error)


def _read_yaml(path: str, kind: type) -> dict:
    try:
        values = yaml.safe_load(Path(at_home(path)).read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        fail(f"{path} cannot be read as YAML: {error}")
    known = {f.name for f in fields(kind)} - {"config"}
    if not isinstance(values, dict) or (unknown := sorted(map(str, set(values) - known))):
        what = f"unknown key {unknown[0]!r}" if isinstance(values, dict) else "not a mapping of keys to values"
        fail(f"{path}: {what}; known keys are {', '.join(sorted(known))}")
    return values


USAGE = """usage: python -m conversion COMMAND ...

commands:
  graft SOURCE OUTPUT           replace the RMSNorms before attention and MLP of a Llama checkpoint by BHyT
  heal MODEL OUTPUT --teacher SOURCE --heal_tokens N
                                train the graft against the logits of its source
  export MODEL OUTPUT           make a plain Llama checkpoint of it, for runtimes that know no other
  verify MODEL --source SOURCE  recompute the figures of its report

`python -m conversion COMMAND --help` says more. Exit codes: 0 done, 1 a budget was missed or a figure differs, 2 bad
input or no room, 70 what nobody foresaw, 129, 130 and 143 stopped by SIGHUP, Ctrl-C and SIGTERM."""


def parse_command(words: list[str]) -> MeasureArguments:
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        sys.exit(0 if words else 2)
    if words[0] not in COMMANDS:
        fail(f"unknown command {words[0]!r}: python -m conversion --help lists them")
    return parse(COMMANDS[words[0]], words[1:])
