"""Measures a model against its source on text that no fit has seen: quality, every site, every layer, and the verdict."""

import math
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from checkpoints.weights import StoredTensors, weight_files
from evaluation.layer_statistics import LayerMeter, LayerStatistics
from evaluation.perplexity import Comparison, compare
from modeling_bhyt import BHyTLlamaConfig
from modeling_bhyt.configuration_bhyt import Site
from modeling_bhyt.normalization_bhyt import mean_square

from .arguments import MeasureArguments
from .calibration import NORM_OF_SITE, Basis, SiteKey, norm_in_basis, tanh_of_site, watch_norms
from .graft import GraftedSite, norm_name
from .source import Source


SATURATION = 0.99
# Rise of perplexity on natural text for each nat of KL(source, graft): README's table has less on C4, 0.3 to 0.8 on
# WikiText-2
NATURAL_SHARE = 0.4
UNMEASURED = ("perplexity", "kl_nats_per_token", "layers", "verdict")


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
        state, y = norm_in_basis(self.basis, self.gammas[layer, site], x, own, self.config.rms_norm_eps)
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


def site_meter(folder: Path, source: Source, config: BHyTLlamaConfig, basis: Basis) -> SiteMeter:
    sites = read_sites(StoredTensors(weight_files(folder)), config.num_hidden_layers)
    return SiteMeter(source, sites, config, basis)


def examine(
    folder: Path, source: Source, basis: Basis | None, windows: Tensor | None, arguments: MeasureArguments
) -> Measurement | None:
    """Loads what was saved in `folder` and measures it against its source. None without windows."""
    if windows is None:
        return None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **arguments.placement)
    meter = None if basis is None else site_meter(folder, source, model.config, basis)
    return measure(source, model, windows, arguments.batch_size, meter)


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
