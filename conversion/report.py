"""Writes down what a command did and what it cost: for programs, for readers, and for the terminal."""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from torch import Tensor

from checkpoints.outputs import names_of_files
from modeling_bhyt import __version__

from .arguments import MeasureArguments
from .measuring import UNMEASURED, Measurement, Verdict, figures
from .picture import PICTURE, draw, has_picture
from .source import Source


# A site that saturates half a channel of every token, or a channel of every second one, clips massive activations
SATURATED_CHANNELS = 0.5
REPORT = "conversion_report.json"
# No second file of weights: loaders that take every *.safetensors of a folder would look for a parameter of that name
WINDOWS = "conversion_windows.json"
# Paths of one machine, and what changes no result
NOT_SETTINGS = [
    "source",
    "model",
    "teacher",
    "output",
    "config",
    "calibration_text",
    "report_text",
    "heal_text",
    "dry_run",
    "overwrite",
]
NOT_SETTINGS += ["push_to_hub", "private", "revision", "max_memory", "resume"]


def with_measurement(
    report: dict, measurement: Measurement | None, windows: Tensor | None, verdict: Verdict | None = None
) -> dict:
    """The report with what was measured in place of what stood there."""
    measured = figures(measurement)
    if measurement is not None and windows is not None:
        measured["perplexity"]["windows_sha256"] = digest(windows)
    if verdict is not None:
        measured["verdict"] = asdict(verdict) | {"passed": verdict.passed, "sentence": verdict.sentence()}
    return report | measured


def digest(windows: Tensor) -> str:
    return hashlib.sha256(windows.numpy().tobytes()).hexdigest()


def save_windows(folder: Path, windows: Tensor):
    """Keeps the text that the source wrote for the report: nobody could write it again on another machine."""
    text = json.dumps({"input_ids": windows.tolist()}, separators=(",", ":"))
    (folder / WINDOWS).write_text(text + "\n", encoding="utf-8")


def start_report(arguments: MeasureArguments, source: Source, texts: dict[str, str], **parts) -> dict:
    """A report before anything was measured: where the model comes from, and what was decided."""
    settings = asdict(arguments)
    for name in NOT_SETTINGS:
        settings.pop(name, None)
    left_out = [f"{name} ({reason})" for name, reason in source.left_out().items()]
    return {
        "bhyt_version": __version__,
        "command": arguments.command(),
        "source": {
            "name": source.hub_id or Path(source.name).name,
            "quantization": source.quantization,
            **source.licence,
            "notes": source.notes,
            "not_read_by_llama": source.unread,
            "files": source.files,
        },
        "settings": settings,
        "texts": texts,
        "tensors": {"kept": len(source.kept_names()), "replaced": len(source.norm_names), "left_out": left_out},
        **dict.fromkeys(("rotation", "choice", "exact_layers", "healing", "protocol", *UNMEASURED)),
        "sites": [],
        **parts,
    }


def save_report(folder: Path, report: dict):
    """Writes the report, last of all files: it names them."""
    (folder / "conversion_report.md").write_text(markdown(report), encoding="utf-8")
    if has_picture(report):
        draw(report, folder / PICTURE)
    report = report | {"files": sorted({*names_of_files(folder), REPORT})}
    (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def summary_rows(report: dict) -> list[tuple[str, str]]:
    """The report in a few lines, for the terminal, conversion_report.md and the card."""
    source = report["source"]
    rows = [("source", source["name"] + (f" (quantised: {source['quantization']})" if source["quantization"] else ""))]
    rows += [("put right", note) for note in source["notes"]]
    if unread := source.get("not_read_by_llama"):
        rows.append(("not read by Llama", ", ".join(unread)))
    rows += _basis_rows(report) + _quality_rows(report) + _choice_rows(report) + _healing_rows(report)
    return rows + _site_rows(report)


def _basis_rows(report: dict) -> list[tuple[str, str]]:
    tensors, rotation = report["tensors"], report["rotation"]
    dtype = report["settings"].get("dtype", "auto")
    how = "copied bit for bit" if dtype == "auto" else f"cast to {dtype}"
    rows = [
        (
            "tensors",
            f"{tensors['kept']} {'rotated' if rotation else how}, {tensors['replaced']} replaced, "
            f"{len(tensors['left_out'])} left out",
        )
    ]
    if rotation:
        rows.append(
            (
                "rotation",
                f"largest logit difference {rotation['max_logit_difference']:.2g} of {rotation['max_logit']:.3g}, "
                f"KL {rotation['kl_nats_per_token']:.2g} nats a token before the norms are replaced",
            )
        )
        if rotation["untied_bytes"]:
            rows.append(("untied head", f"{rotation['untied_bytes'] / 1e6:.1f} MB more than the source"))
    return rows


def _quality_rows(report: dict) -> list[tuple[str, str]]:
    quality = report["perplexity"]
    if quality is None:
        return [("quality", "not measured")]
    rows = [
        ("perplexity of the source", f"{quality['source']:.4f}"),
        ("perplexity of this model", f"{quality['model']:.4f}"),
        ("ratio", f"{quality['ratio']:.4f}"),
        ("KL(source, this model)", f"{report['kl_nats_per_token']:.5f} nats a token"),
        (
            "measured on",
            f"{report['texts']['report']}: {quality['num_windows']} windows of {quality['window_length']} tokens",
        ),
    ]
    rows += _protocol_rows(report.get("protocol"))
    if report["verdict"]:
        rows.append(("rise of perplexity", report["verdict"]["sentence"]))
    return rows


def _protocol_rows(protocol: dict | None) -> list[tuple[str, str]]:
    # Older reports have none
    if protocol is None:
        return []
    begins = "each begins with BOS" if protocol["bos"] else "no BOS"
    windows = f"{begins}, stride {protocol['stride']} tokens, from window {protocol['first_window']} of the text on"
    size = f"{protocol['num_tokens']} tokens, {protocol['num_words']} words, {protocol['num_bytes']} bytes"
    left_over = protocol["num_left_over_tokens"]
    return [("windows", windows), ("text", size + (f"; {left_over} more tokens left over" if left_over else ""))]


def _choice_rows(report: dict) -> list[tuple[str, str]]:
    rows = []
    if "calibration" in report["texts"]:
        rows.append(("calibrated on", report["texts"]["calibration"]))
    if report["exact_layers"] is not None:
        layers = ", ".join(map(str, report["exact_layers"])) or "none"
        rows.append(("layers with an exact second statistic", layers))
    if report["choice"]:
        rows.append(("chosen", report["choice"]["sentence"]))
    return rows


def _healing_rows(report: dict) -> list[tuple[str, str]]:
    if not report["healing"]:
        return []
    healing = report["healing"]
    before = healing["before"]
    return [
        (
            "healed",
            f"{healing['train']} on {healing['num_tokens']} tokens of {healing['text']}"
            + (
                f"; before: ratio {before['perplexity']['ratio']:.4f}, KL {before['kl_nats_per_token']:.5f}"
                if before
                else ""
            ),
        )
    ]


def _site_rows(report: dict) -> list[tuple[str, str]]:
    sites = report["sites"]
    if not sites:
        return []
    rows = []
    lambdas = [site["lam"] for site in sites]
    rows.append(("lambda", f"{min(lambdas):.4g} to {max(lambdas):.4g}"))
    if measured := [site for site in sites if site["relative_output_error"] is not None]:
        worst = max(measured, key=lambda site: site["relative_output_error"])
        saturated = max(measured, key=lambda site: site["saturated_share"])
        rows.append(("largest relative output error", f"{worst['relative_output_error']:.4f} ({_place(worst)})"))
        share = f"{saturated['saturated_share']:.2e} ({_place(saturated)})" if saturated["saturated_share"] else "none"
        rows.append(("largest share of tanh beyond 0.99", share))
        if clipped := [site for site in measured if site["saturated_channels"] >= SATURATED_CHANNELS]:
            places = "; ".join(f"{_place(site)}: {site['saturated_channels']:.1f}" for site in clipped[:4])
            rows.append(
                (
                    "CLIPPED massive activations",
                    f"{len(clipped)} sites clip {SATURATED_CHANNELS} channels of a token or more ({places}): take a smaller "
                    "lambda there, or --basis rotated",
                )
            )
    if estimated := [site for site in sites if site["estimator_log_error"] is not None]:
        error = max(estimated, key=lambda site: site["estimator_log_error"])
        rows.append(("largest log error of the estimator", f"{error['estimator_log_error']:.4f} ({_place(error)})"))
    within = sum(site["depth_effective"] < site["depth_limit"] for site in sites)
    nominal = sum(site["depth_nominal"] < site["depth_limit"] for site in sites)
    limit = sites[0]["depth_limit"]
    bound = f"at {nominal} of {len(sites)} sites at gamma = 1, {within} with the gains (limit {limit:.4g})"
    return [*rows, ("depth bound (Theorem 3.5) holds", bound)]


def _place(site: dict) -> str:
    return f"layer {site['layer']}, {site['site']}"


def markdown(report: dict) -> str:
    lines = ["# Conversion report", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in summary_rows(report)]
    if has_picture(report):
        lines += ["", f"![cost against lambda, and the variance of each layer]({PICTURE})"]
    lines += ["", *NOTES]
    if report["choice"]:
        lines += ["", "## What was chosen, and why", "", *report["choice"]["why"]]
    if report["sites"]:
        lines += ["", "## Sites", "", *_site_table(report["sites"])]
    return "\n".join(lines) + "\n"


NOTES = [
    "On text that the source wrote itself the logarithm of the ratio estimates the KL divergence; on other text it may be",
    "smaller, even negative.",
    "",
    "A graft near the identity keeps the source's gains and with them its growth of variance over depth: the depth",
    "bound is stated at gamma = 1, and the second figure is what the gains make of it.",
]


def _site_table(sites: list[dict]) -> list[str]:
    lines = [
        "| layer | site | lambda | r | c | relative output error | saturated share | estimator's log error | "
        "lambda / kappa | rms(gamma) lambda / kappa |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for site in sites:
        exact = site["variance_ratio"] is None
        names = ["lam", "variance_ratio", "variance_offset", "relative_output_error", "saturated_share"]
        names += ["estimator_log_error", "depth_nominal", "depth_effective"]
        cells = [str(site["layer"]), site["site"]]
        for name in names:
            absent = "exact" if exact and name.startswith(("variance", "estimator")) else "not measured"
            cells.append(absent if site[name] is None else f"{site[name]:.4g}")
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def show(report: dict, title: str):
    """Prints the summary to the terminal."""
    table = Table(title=title, show_header=False)
    for row in summary_rows(report):
        table.add_row(*row)
    Console().print(table)
