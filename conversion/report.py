"""Measures a graft against its source on text that no fit has seen, and says what it cost."""

import hashlib
import json
import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from evaluation.layer_statistics import LayerMeter, LayerStatistics
from evaluation.perplexity import Comparison, compare
from modeling_bhyt import BHyTLlamaConfig, __version__
from modeling_bhyt.configuration_bhyt import Site
from modeling_bhyt.normalization_bhyt import mean_square

from .arguments import MeasureArguments
from .calibration import NORM_OF_SITE, Basis, SiteKey, tanh_of_site, watch_norms
from .graft import GraftedSite, norm_name
from .picture import PICTURE, draw, has_picture
from .source import Source, StoredTensors, weight_files


SATURATION = 0.99
# A site that saturates half a channel of every token, or a channel of every second one, clips massive activations
SATURATED_CHANNELS = 0.5
WINDOWS = "conversion_windows.safetensors"
UNMEASURED = ("perplexity", "kl_nats_per_token", "layers", "verdict")
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
NOT_SETTINGS += ["push_to_hub", "private", "max_memory", "resume"]
# Rise of perplexity on natural text for each nat of KL(source, graft): 0.2 to 0.5 in the grafts of SmolLM2 that
# docs/LOG.md records on C4
NATURAL_SHARE = 0.4


@dataclass
class SiteReport:
    """One row a site, over every token of the report's text (the estimator's error without each window's first).

    relative_output_error: ||y' - y|| / ||y||, y the source norm's output, y' the graft's for the same input.
    saturated_share: share of |tanh| > 0.99; saturated_channels: the same as channels of a token, of D.
    estimator_log_error: root mean square of log((r m + c) / m'), m and m' the mean squares; None where it is exact.
    depth_nominal, depth_effective: lambda / kappa and rms(gamma) lambda / kappa, to stay below depth_limit = 1 / sqrt(L).
    """

    layer: int
    site: Site
    lam: float
    variance_ratio: float | None
    variance_offset: float | None
    relative_output_error: float | None
    saturated_share: float | None
    saturated_channels: float | None
    estimator_log_error: float | None
    depth_nominal: float
    depth_effective: float
    depth_limit: float


def read_sites(tensors: StoredTensors, num_layers: int) -> dict[SiteKey, GraftedSite]:
    """The parameters of every BHyT site of a stored checkpoint."""
    sites: dict[SiteKey, GraftedSite] = {}
    for layer in range(num_layers):
        for site in NORM_OF_SITE:
            prefix = norm_name((layer, site)).removesuffix("weight")
            gain = tensors[prefix + "weight"]
            grafted = GraftedSite(tensors[prefix + "lam"].item(), gain.dtype, gain)
            if prefix + "variance_ratio" in tensors:
                # The model reflects both at 0
                grafted.ratio = abs(tensors[prefix + "variance_ratio"].item())
                grafted.offset = abs(tensors[prefix + "variance_offset"].item())
            sites[layer, site] = grafted
    return sites


class SiteMeter:
    """Sums what a SiteReport needs while the source runs, seen in the basis of the graft."""

    def __init__(self, source: Source, sites: dict[SiteKey, GraftedSite], config: BHyTLlamaConfig, basis: Basis):
        self.sites, self.config, self.basis = sites, config, basis
        self.gammas = {key: source.tensors[norm_name(key)] for key in sites}
        self.sums = {key: torch.zeros(6, dtype=torch.float64) for key in sites}
        self._block_input: dict[int, Tensor] = {}

    def see(self, layer: int, site: Site, x: Tensor, y: Tensor):
        grafted = self.sites[layer, site]
        own = mean_square(x)
        if site == "attention":
            self._block_input[layer] = own
        used = grafted.statistic(own, self._block_input[layer])
        state = self.basis.state(x.float())
        gamma = self.basis.gain(self.gammas[layer, site].to(x.device).float())
        y = gamma * state / torch.sqrt(own + self.config.rms_norm_eps)
        t = tanh_of_site(state, grafted.lam, self.config.kappa, used, self.config.rms_norm_eps)
        gain = grafted.gain.to(grafted.dtype).to(x.device).float()
        log_error = torch.log(used / own)[:, 1:].double()
        sums = [
            (gain * t - y).double().pow(2).sum(),
            y.double().pow(2).sum(),
            (t.abs() > SATURATION).sum(),
            t.numel(),
            log_error.pow(2).sum(),
            log_error.numel(),
        ]
        self.sums[layer, site] += torch.tensor([float(value) for value in sums], dtype=torch.float64)

    def rows(self) -> list[SiteReport]:
        return [self._row(key) for key in self.sites]

    def _row(self, key: SiteKey) -> SiteReport:
        grafted = self.sites[key]
        error, total, saturated, values, log_error, tokens = self.sums[key].tolist()
        nominal = abs(grafted.lam) / self.config.kappa
        measured = values > 0
        return SiteReport(
            *key,
            grafted.lam,
            grafted.ratio,
            grafted.offset,
            (error / total) ** 0.5 if measured else None,
            saturated / values if measured else None,
            saturated / values * self.config.hidden_size if measured else None,
            (log_error / tokens) ** 0.5 if measured and grafted.ratio is not None else None,
            nominal,
            nominal * grafted.gain.double().pow(2).mean().sqrt().item(),
            1 / math.sqrt(self.config.num_hidden_layers),
        )


@dataclass
class Measurement:
    """A model against its source on the same windows: quality, sites, and the layers of both."""

    comparison: Comparison
    sites: list[SiteReport]
    source_layers: list[LayerStatistics]
    model_layers: list[LayerStatistics]


def measure(
    source: Source, model: PreTrainedModel, windows: Tensor, batch_size: int, meter: SiteMeter | None
) -> Measurement:
    """Everything in one pass over held-out windows; without a meter there is no row a site."""
    layers = [LayerMeter(source.model), LayerMeter(model)]
    with ExitStack() as stack:
        if meter is not None:
            stack.enter_context(watch_norms(source.model, meter.see))
        for layer_meter in layers:
            stack.enter_context(layer_meter.watch())
        comparison = compare(source.model, model, windows, batch_size)
    return Measurement(comparison, meter.rows() if meter else [], *(meter.statistics() for meter in layers))


def figures(measurement: Measurement | None) -> dict:
    """What was measured, as it stands in conversion_report.json."""
    if measurement is None:
        return dict.fromkeys(UNMEASURED)
    comparison = measurement.comparison
    return {
        "perplexity": {
            "source": comparison.reference.perplexity,
            "model": comparison.model.perplexity,
            "ratio": comparison.ratio,
            "num_windows": comparison.model.num_windows,
            "window_length": comparison.model.window_length,
            "num_predicted_tokens": comparison.model.num_tokens,
        },
        "kl_nats_per_token": comparison.kl,
        "sites": [asdict(site) for site in measurement.sites],
        "layers": {
            "source": [asdict(layer) for layer in measurement.source_layers],
            "model": [asdict(layer) for layer in measurement.model_layers],
        },
    }


@dataclass
class Verdict:
    """Whether the rise of perplexity stays within what was allowed.

    rise: on a text that was named, the ratio of perplexities less 1; on the source's own text, where that ratio is
        exp(KL) and more than natural text shows, NATURAL_SHARE of the KL.
    allowed: the budget, and beside it what the user's own choices cost by prediction. None where all was set by hand.
    """

    rise: float
    budget: float
    allowed: float | None

    @classmethod
    def of(cls, comparison: Comparison, is_sampled: bool, budget: float, by_hand: float | None) -> "Verdict":
        """by_hand: nats a token that the user's own choices cost; None where nothing was left to choose."""
        rise = NATURAL_SHARE * comparison.kl if is_sampled else comparison.ratio - 1
        return cls(rise, budget, None if by_hand is None else budget + NATURAL_SHARE * by_hand)

    @property
    def passed(self) -> bool:
        return self.allowed is None or self.rise <= self.allowed

    def sentence(self) -> str:
        if self.allowed is None:
            return f"{self.rise:+.4f}, all of it set by hand (budget {self.budget:g})"
        by_hand = (
            f", {self.allowed - self.budget:.4f} of it for what was set by hand" if self.allowed > self.budget else ""
        )
        return f"{self.rise:+.4f}, {'within' if self.passed else 'ABOVE'} the {self.allowed:.4f} allowed{by_hand}"


def examine(
    folder: Path, source: Source, basis: Basis | None, windows: Tensor | None, arguments: MeasureArguments
) -> Measurement | None:
    """Loads what was saved in `folder` and measures it against its source. None without windows."""
    if windows is None:
        return None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **arguments.placement)
    meter = None if basis is None else site_meter(folder, source, model.config, basis)
    return measure(source, model, windows, arguments.batch_size, meter)


def with_measurement(
    report: dict, measurement: Measurement | None, windows: Tensor | None, verdict: Verdict | None = None
) -> dict:
    """The report with what was measured in place of what stood there."""
    measured = figures(measurement)
    if measurement is not None and windows is not None:
        measured["perplexity"]["windows_sha256"] = hashlib.sha256(windows.numpy().tobytes()).hexdigest()
    if verdict is not None:
        measured["verdict"] = asdict(verdict) | {"passed": verdict.passed, "sentence": verdict.sentence()}
    return report | measured


def save_windows(folder: Path, windows: Tensor):
    """Keeps the text that the source wrote for the report: nobody could write it again on another machine."""
    save_file({"input_ids": windows.contiguous()}, folder / WINDOWS)


def site_meter(folder: Path, source: Source, config: BHyTLlamaConfig, basis: Basis) -> SiteMeter:
    sites = read_sites(StoredTensors(weight_files(folder)), config.num_hidden_layers)
    return SiteMeter(source, sites, config, basis)


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
            "license": source.license,
            "notes": source.notes,
            "files": source.files,
        },
        "settings": settings,
        "texts": texts,
        "tensors": {"kept": len(source.kept_names()), "replaced": len(source.norm_names), "left_out": left_out},
        **dict.fromkeys(("rotation", "choice", "exact_layers", "healing", *UNMEASURED)),
        "sites": [],
        **parts,
    }


def save_report(folder: Path, report: dict):
    (folder / "conversion_report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (folder / "conversion_report.md").write_text(markdown(report), encoding="utf-8")
    if has_picture(report):
        draw(report, folder / PICTURE)


def summary_rows(report: dict) -> list[tuple[str, str]]:
    """The report in a few lines, for the terminal, conversion_report.md and the card."""
    source = report["source"]
    rows = [("source", source["name"] + (f" (quantised: {source['quantization']})" if source["quantization"] else ""))]
    rows += [("put right", note) for note in source["notes"]]
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
    if report["verdict"]:
        rows.append(("rise of perplexity", report["verdict"]["sentence"]))
    return rows


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
