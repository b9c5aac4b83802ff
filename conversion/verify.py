"""Recomputes what a report claims, and says where it differs."""

import json
import math
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor

from checkpoints.weights import read_json

from .report import WINDOWS, digest
from .source import Source
from .texts import Texts


# Sums in another order, on another machine or in other batches, move the sixth digit of what is measured
TOLERANCE = 2e-3
ABSOLUTE = 1e-4
# Where reports of version 0.1.0 kept their windows
FORMER_WINDOWS = "conversion_windows.safetensors"


def read_report(folder: str) -> dict:
    """The report of a converted checkpoint.

    Raises:
        ValueError: there is none.
    """
    file = Path(folder) / "conversion_report.json"
    if not file.is_file():
        raise ValueError(
            f"{folder} has no conversion_report.json: give the folder that a command of this project made"
        )
    return json.loads(file.read_text(encoding="utf-8"))


def report_windows(folder: Path, report: dict, source: Source, report_text: str | None) -> Tensor:
    """The windows that the report was measured on.

    Raises:
        ValueError: a text that has to be named, or that is another one.
    """
    quality = report["perplexity"]
    if report_text is None and (folder / WINDOWS).is_file():
        windows = torch.tensor(read_json(folder / WINDOWS)["input_ids"])
    elif report_text is None and (folder / FORMER_WINDOWS).is_file():
        windows = load_file(folder / FORMER_WINDOWS)["input_ids"]
    elif report_text is None:
        raise ValueError(f"the report was measured on {report['texts']['report']}: name it with --report_text")
    else:
        first = first_window(report)
        texts = Texts(source, quality["window_length"], {"report": (report_text, first + quality["num_windows"])})
        cut = texts.windows(seed=0)["report"]
        assert cut is not None
        windows = cut[first:]
    if digest(windows) != quality["windows_sha256"]:
        raise ValueError("the text is not the one that the report was measured on: its tokens differ")
    return windows


def first_window(report: dict) -> int:
    """Where the report's part of its text began."""
    if report.get("protocol"):
        return report["protocol"]["first_window"]
    # Reports of version 0.1.0 say it in words: the part after the calibration's
    is_second = report["texts"]["report"].endswith(", another part")
    settings = report["settings"]
    return math.ceil(settings["num_calibration_tokens"] / settings["window_length"]) if is_second else 0


def flatten(figures, path: str = "") -> dict[str, float]:
    """Every number of nested figures under its path."""
    if isinstance(figures, list):
        figures = dict(enumerate(figures))
    if not isinstance(figures, dict):
        return {path: figures} if isinstance(figures, (int, float)) and not isinstance(figures, bool) else {}
    found: dict[str, float] = {}
    for name, value in figures.items():
        found |= flatten(value, f"{path}.{name}" if path else str(name))
    return found


def differences(stated: dict, recomputed: dict) -> list[tuple[str, float | None, float | None]]:
    """(figure, stated, recomputed) wherever the two differ by more than the order of a sum can explain."""
    before, after = flatten(stated), flatten(recomputed)
    found = []
    for name in {**before, **after}:
        one, other = before.get(name), after.get(name)
        if one is None or other is None or not math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=ABSOLUTE):
            found.append((name, one, other))
    return found


def show_differences(found: list[tuple[str, float | None, float | None]], num_figures: int):
    if not found:
        Console().print(f"verified: {num_figures} figures of the report were recomputed, and none differs")
        return
    table = Table("figure", "report", "recomputed", title=f"{len(found)} of {num_figures} figures differ")
    for row in found:
        table.add_row(*("absent" if value is None else str(value) for value in row))
    Console().print(table)
