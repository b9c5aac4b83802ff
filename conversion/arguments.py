"""Arguments of `python -m conversion`: one data class a command; the flag is the field is the YAML key."""

import math
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NoReturn

import yaml
from transformers import HfArgumentParser


DTYPES = ("auto", "float32", "bfloat16", "float16")
ESTIMATORS = ("fitted", "uniform_attention", "published", "exact")


@dataclass
class GraftArguments:
    """Grafts BHyT into a plain Llama checkpoint: python -m conversion graft SOURCE OUTPUT [--flags]"""

    source: str = field(
        default="", metadata={"help": "A folder with a safetensors checkpoint, a .gguf file, or a Hub id."}
    )
    output: str = field(default="", metadata={"help": "The folder to make."})
    config: str | None = field(default=None, metadata={"help": "A YAML file with any of these; flags override it."})
    attention_lambda: list[float] = field(
        default_factory=lambda: [0.25],
        metadata={"help": "lambda before the attention: a number, or one a layer. Smaller is nearer to the source."},
    )
    mlp_lambda: list[float] = field(
        default_factory=lambda: [0.25], metadata={"help": "lambda before the MLP: a number, or one a layer."}
    )
    kappa: float = field(default=10.0, metadata={"help": "How many standard deviations stay inside the bound."})
    variance_estimator: str = field(
        default="fitted",
        metadata={
            "help": "Where the second site's mean square comes from: r and c fitted to text, a constant computed from "
            "the weights (uniform_attention, published), or a reduction (exact).",
            "choices": ESTIMATORS,
        },
    )
    exact_variance_layers: list[str] = field(
        default_factory=list, metadata={"help": "Layers that reduce at the second site all the same, as in 0,24."}
    )
    calibration_text: str | None = field(
        default=None,
        metadata={
            "help": "A text file, or JSONL with `text`; FILE[a:b] takes documents a to b. Default: text sampled from "
            "the source model itself."
        },
    )
    report_text: str | None = field(
        default=None,
        metadata={"help": "The same, for the report. Default: a part of the above that calibration did not see."},
    )
    num_calibration_tokens: int = field(default=4096, metadata={"help": "Tokens to calibrate on."})
    num_report_tokens: int = field(default=4096, metadata={"help": "Tokens to measure the result on."})
    window_length: int = field(default=512, metadata={"help": "Tokens a window, for both."})
    batch_size: int = field(
        default=4, metadata={"help": "Windows at a time in calibration and report. Changes speed and memory only."}
    )
    dtype: str = field(
        default="auto",
        metadata={"help": "dtype to save; auto is the source's, float32 for GGUF.", "choices": DTYPES},
    )
    seed: int = field(default=0, metadata={"help": "Seed of the sampled text."})
    dry_run: bool = field(default=False, metadata={"help": "Check everything, say what would be done, write nothing."})
    overwrite: bool = field(default=False, metadata={"help": "Replace OUTPUT if it exists."})

    def __post_init__(self):
        # A YAML file may hold any type
        texts = dict.fromkeys(("source", "output", "calibration_text", "report_text"), str)
        for name, kind in {**texts, "dry_run": bool, "overwrite": bool}.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"{name} is {value!r}: give {'a file name' if kind is str else 'true or false'}")
        for name in ("source", "output"):
            if not getattr(self, name):
                raise ValueError(f"{name.upper()} is missing: python -m conversion graft SOURCE OUTPUT")
        self.exact_layers = _layer_indices(self.exact_variance_layers)
        for name in ("attention_lambda", "mlp_lambda", "kappa"):
            value = getattr(self, name)
            for number in value if isinstance(value, list) else [value]:
                if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < math.inf:
                    raise ValueError(f"{name} is {number!r}: give a finite number above 0")
        for name, least in (
            ("num_calibration_tokens", 1),
            ("num_report_tokens", 1),
            ("window_length", 8),
            ("batch_size", 1),
            ("seed", 0),
        ):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(f"{name} is {number!r}: give a whole number of at least {least}")
        for name, choices in (("dtype", DTYPES), ("variance_estimator", ESTIMATORS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}: choose from {', '.join(choices)}")
        output, source = Path(self.output).resolve(), Path(self.source).resolve()
        if output == source or output in source.parents or source in output.parents:
            raise ValueError(f"OUTPUT {self.output} and SOURCE {self.source} hold each other: choose another folder")

    @property
    def num_calibration_windows(self) -> int:
        return math.ceil(self.num_calibration_tokens / self.window_length)

    @property
    def num_report_windows(self) -> int:
        return math.ceil(self.num_report_tokens / self.window_length)


def _layer_indices(layers) -> list[int]:
    """[0, 24], ["0", "24"] and ["0,24"] all mean layers 0 and 24."""
    parts = layers if isinstance(layers, list) else [layers]
    words = [word for part in parts for word in str(part).replace(",", " ").split()]
    if bad := [word for word in words if not word.isdecimal()]:
        raise ValueError(f"exact_variance_layers names {bad[0]!r}: give layer numbers from 0, as in 0,24")
    return sorted({int(word) for word in words})


class OneLineParser(HfArgumentParser):
    """Identical to HfArgumentParser except: bad input gets one line, not the whole usage."""

    def error(self, message: str) -> NoReturn:
        fail(message)


def parse_graft_arguments(words: list[str]) -> GraftArguments:
    """Flags over the YAML of `--config` over the defaults. Exits with 2 and one line on any bad input."""
    parser = OneLineParser(GraftArguments, prog="python -m conversion graft", description=GraftArguments.__doc__)
    parser.add_argument("places", nargs="*", metavar="SOURCE OUTPUT", help="the same as --source and --output")
    early, unknown = parser.parse_known_args(words)
    if unknown or len(early.places) > 2:
        parser.error(f"unknown argument {(unknown or early.places[2:])[0]!r}: see python -m conversion graft --help")
    defaults = _read_yaml(early.config) if early.config else {}
    parser.set_defaults(**defaults | dict(zip(("source", "output"), early.places)))
    try:
        return parser.parse_args_into_dataclasses(words)[0]
    except ValueError as error:
        fail(str(error))


def fail(message: str, code: int = 2) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)


def _read_yaml(path: str) -> dict:
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8")) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        fail(f"{path} cannot be read as YAML: {' '.join(str(error).split())}")
    known = {f.name for f in fields(GraftArguments)} - {"config"}
    if not isinstance(values, dict) or (unknown := sorted(set(values) - known)):
        what = f"unknown key {unknown[0]!r}" if isinstance(values, dict) else "not a mapping of keys to values"
        fail(f"{path}: {what}; known keys are {', '.join(sorted(known))}")
    for name in ("attention_lambda", "mlp_lambda"):
        if name in values and not isinstance(values[name], list):
            values[name] = [values[name]]
    return values


USAGE = """usage: python -m conversion COMMAND ...

commands:
  graft SOURCE OUTPUT   replace the RMSNorms before attention and MLP of a Llama checkpoint by BHyT

`python -m conversion COMMAND --help` says more. Exit codes: 0 done, 2 bad input."""


def command_and_arguments() -> tuple[str, list[str]]:
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        sys.exit(0 if words else 2)
    return words[0], words[1:]
