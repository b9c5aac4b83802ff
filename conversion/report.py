"""What the graft cost: measured on text that calibration did not see, written beside the weights."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from evaluation.perplexity import Comparison, compare
from modeling_bhyt import BHyTLlamaForCausalLM, __version__
from modeling_bhyt.configuration_bhyt import Site
from modeling_bhyt.normalization_bhyt import mean_square

from .arguments import GraftArguments
from .calibration import site_norms, tanh_of_site, watch_norms
from .graft import Graft
from .source import Source


SATURATION = 0.99


@dataclass
class SiteReport:
    """One row a site, over every token of the report's text (the estimator's error without each window's first).

    relative_output_error: ||y' - y|| / ||y||, y the source norm's output, y' the graft's for the same input.
    saturated_share: share of |tanh| > 0.99.
    estimator_log_error: root mean square of log((r m + c) / m'), m and m' the mean squares; None where it is exact.
    depth_nominal, depth_effective: lambda / kappa and rms(gamma) lambda / kappa, to stay below depth_limit = 1 / sqrt(L).
    """

    layer: int
    site: Site
    lam: float
    variance_ratio: float | None
    variance_offset: float | None
    relative_output_error: float
    saturated_share: float
    estimator_log_error: float | None
    depth_nominal: float
    depth_effective: float
    depth_limit: float


class SiteMeter:
    """Sums what a SiteReport needs while the source runs."""

    def __init__(self, source: Source, graft: Graft):
        self.graft = graft
        self.norms = {(layer, site): norm for layer, site, norm in site_norms(source.model)}
        self.sums = {key: torch.zeros(6, dtype=torch.float64) for key in self.norms}
        self._block_input: dict[int, Tensor] = {}

    def see(self, layer: int, site: Site, x: Tensor):
        config, grafted = self.graft.config, self.graft.sites[layer, site]
        own = mean_square(x)
        if site == "attention":
            self._block_input[layer] = own
        used = grafted.statistic(own, self._block_input[layer])
        t = tanh_of_site(x, grafted.lam, config.kappa, used, config.rms_norm_eps)
        y = self.norms[layer, site].forward(x)
        gain = grafted.gain.to(grafted.dtype).float()
        log_error = torch.log(used / own)[:, 1:].double()
        self.sums[layer, site] += torch.tensor(
            [
                (gain * t - y).double().pow(2).sum(),
                y.double().pow(2).sum(),
                (t.abs() > SATURATION).sum(),
                t.numel(),
                log_error.pow(2).sum(),
                log_error.numel(),
            ],
            dtype=torch.float64,
        )

    def rows(self, model: BHyTLlamaForCausalLM) -> list[SiteReport]:
        rows = []
        for bound in model.depth_bounds():
            site = self.graft.sites[bound.layer, bound.site]
            error, total, saturated, values, log_error, tokens = self.sums[bound.layer, bound.site].tolist()
            rows.append(
                SiteReport(
                    bound.layer,
                    bound.site,
                    site.lam,
                    site.ratio,
                    site.offset,
                    (error / total) ** 0.5,
                    saturated / values,
                    (log_error / tokens) ** 0.5 if site.is_estimated else None,
                    bound.nominal,
                    bound.effective,
                    bound.limit,
                )
            )
        return rows


def measure(
    source: Source, graft: Graft, model: BHyTLlamaForCausalLM, windows: Tensor, batch_size: int
) -> tuple[Comparison, list[SiteReport]]:
    """Perplexity and KL against the source, and a row a site, in one pass over held-out windows."""
    meter = SiteMeter(source, graft)
    with watch_norms(source.model, meter.see):
        comparison = compare(source.model, model, windows, batch_size)
    return comparison, meter.rows(model)


def report_of(
    arguments: GraftArguments,
    source: Source,
    graft: Graft,
    texts: dict[str, str],
    comparison: Comparison,
    sites: list[SiteReport],
) -> dict:
    """The whole report as it stands in conversion_report.json."""
    settings = asdict(arguments)
    for place in ("source", "output", "config", "calibration_text", "report_text", "dry_run", "overwrite"):
        settings.pop(place)
    return {
        "bhyt_version": __version__,
        "source": {
            "name": source.hub_id or Path(source.name).name,
            "quantization": source.quantization,
            "license": source.license,
            "files": source.files,
        },
        "settings": settings,
        "texts": texts,
        "perplexity": {
            "source": comparison.reference.perplexity,
            "bhyt": comparison.model.perplexity,
            "ratio": comparison.ratio,
            "num_windows": comparison.model.num_windows,
            "window_length": comparison.model.window_length,
            "num_predicted_tokens": comparison.model.num_tokens,
        },
        "kl_nats_per_token": comparison.kl,
        "tensors": source.count_tensors(),
        "exact_layers": [i for i in range(graft.config.num_hidden_layers) if i not in graft.config.estimated_layers],
        "sites": [asdict(site) for site in sites],
    }


def summary_rows(report: dict) -> list[tuple[str, str]]:
    """The report in a few lines, for the terminal, conversion_report.md and the card."""
    quality, sites = report["perplexity"], report["sites"]
    worst = max(sites, key=lambda site: site["relative_output_error"])
    saturated = max(sites, key=lambda site: site["saturated_share"])
    estimated = [site for site in sites if site["estimator_log_error"] is not None]
    within = sum(site["depth_effective"] < site["depth_limit"] for site in sites)
    nominal = sum(site["depth_nominal"] < site["depth_limit"] for site in sites)
    source, tensors, dtype = report["source"], report["tensors"], report["settings"]["dtype"]
    how = "copied bit for bit" if dtype == "auto" else f"cast to {dtype}"
    rows = [
        ("source", source["name"] + (f" (quantised: {source['quantization']})" if source["quantization"] else "")),
        ("tensors", f"{tensors['copied']} {how}, {tensors['replaced']} replaced, {len(tensors['left_out'])} left out"),
        ("perplexity of the source", f"{quality['source']:.4f}"),
        ("perplexity of the graft", f"{quality['bhyt']:.4f}"),
        ("ratio", f"{quality['ratio']:.4f}"),
        ("KL(source, graft)", f"{report['kl_nats_per_token']:.5f} nats a token"),
        (
            "measured on",
            f"{report['texts']['report']}: {quality['num_windows']} windows of {quality['window_length']} tokens",
        ),
        ("calibrated on", report["texts"]["calibration"]),
        ("layers with an exact second statistic", ", ".join(map(str, report["exact_layers"])) or "none"),
        ("largest relative output error", f"{worst['relative_output_error']:.4f} ({_place(worst)})"),
        (
            "largest share of tanh beyond 0.99",
            f"{saturated['saturated_share']:.2e} ({_place(saturated)})" if saturated["saturated_share"] else "none",
        ),
    ]
    if estimated:
        error = max(estimated, key=lambda site: site["estimator_log_error"])
        rows.append(("largest log error of the estimator", f"{error['estimator_log_error']:.4f} ({_place(error)})"))
    rows.append(
        (
            "depth bound (Theorem 3.5) holds",
            f"at {nominal} of {len(sites)} sites at gamma = 1, {within} with the gains (limit {sites[0]['depth_limit']:.4g})",
        )
    )
    return rows


def _place(site: dict) -> str:
    return f"layer {site['layer']}, {site['site']}"


def markdown(report: dict) -> str:
    lines = ["# Conversion report", "", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in summary_rows(report)]
    lines += [
        "",
        "On text that the source wrote itself the logarithm of the ratio estimates the KL divergence; on other text it may be",
        "smaller, even negative.",
        "",
        "A graft near the identity keeps the source's gains and with them its growth of variance over depth: the depth",
        "bound is stated at gamma = 1, and the second figure is what the gains make of it.",
        "",
        "## Sites",
        "",
        "| layer | site | lambda | r | c | relative output error | saturated share | estimator's log error | "
        "lambda / kappa | rms(gamma) lambda / kappa |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for site in report["sites"]:
        cells = [site["layer"], site["site"], f"{site['lam']:.4g}"]
        cells += [_number(site["variance_ratio"]), _number(site["variance_offset"])]
        cells += [f"{site['relative_output_error']:.4f}", f"{site['saturated_share']:.2e}"]
        cells += [
            _number(site["estimator_log_error"]),
            f"{site['depth_nominal']:.4g}",
            f"{site['depth_effective']:.4g}",
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def _number(value: float | None) -> str:
    return "exact" if value is None else f"{value:.4g}"


def show(report: dict):
    """Prints the summary to the terminal."""
    table = Table(title=f"BHyT graft of {report['source']['name']}", show_header=False)
    for row in summary_rows(report):
        table.add_row(*row)
    Console().print(table)


def save_report(folder: Path, report: dict):
    (folder / "conversion_report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (folder / "conversion_report.md").write_text(markdown(report), encoding="utf-8")
