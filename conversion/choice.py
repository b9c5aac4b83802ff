"""Chooses what the user left open: lambda at each site, and the layers that reduce at their second site.

What a candidate costs is the KL divergence from the source, in nats a token, that it alone would cause. To second order

    KL = 1/2 E[(g . (y' - y))^2]

with y the source norm's output, y' the candidate's, and g the gradient, at y, of the log probability of tokens drawn from
the source's own predictions (the Fisher information of the logits). One backward pass gives it for every candidate of
every site; errors of different tokens are taken as uncorrelated. Costs of different sites add up.
"""

import math
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from rich.progress import track
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from evaluation.perplexity import input_device
from modeling_bhyt.configuration_bhyt import Site
from modeling_bhyt.normalization_bhyt import mean_square

from .arguments import GraftArguments
from .calibration import NORM_OF_SITE, Basis, Candidate, SiteKey, watch_norms
from .graft import Graft, Sites, bhyt_config


# lambda that auto chooses from: in the rotated basis 1 costs next to nothing, in the original one outlier channels do
LAMBDAS = {
    "rotated": (1.0, 1.125, 1.25, 1.375, 1.5, 1.75, 2.0),
    "original": (0.125, 0.1875, 0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.0),
}
# A few of them draw the curve of the basis that was not chosen
CURVE = {"rotated": (1.0, 1.5, 2.0), "original": (0.125, 0.25, 0.5, 1.0, 2.0)}
# The part of a target that lambda may use up: unseen text may cost more than predicted
MARGIN = 0.9
# Windows that sensitivity is measured on: a backward pass costs three forward ones
NUM_COST_WINDOWS = 4
Costs = dict[SiteKey, dict[Candidate, float]]


def candidates(arguments: GraftArguments, num_layers: int) -> dict[SiteKey, list[Candidate]]:
    """Every way to graft each site that is still open; for the curve, some more."""
    result: dict[SiteKey, list[Candidate]] = {}
    curve = [Candidate(basis, lam, True) for basis, lambdas in CURVE.items() for lam in lambdas]
    for layer in range(num_layers):
        for site in NORM_OF_SITE:
            options = open_options(arguments, site, layer)
            extra = [option for option in curve if option not in options] if arguments.is_auto else []
            result[layer, site] = options + extra
    return result


def open_options(arguments: GraftArguments, site: Site, layer: int) -> list[Candidate]:
    """What the user left open at a site; an estimate comes before the same lambda with its own statistic."""
    if site == "attention" or arguments.variance_estimator == "exact":
        kinds = [True]
    elif arguments.exact_layers is None:
        kinds = [False, True]
    else:
        kinds = [layer in arguments.exact_layers]
    return [Candidate(arguments.basis, lam, kind) for lam in open_lambdas(arguments, site, layer) for kind in kinds]


def open_lambdas(arguments: GraftArguments, site: Site, layer: int) -> tuple[float, ...]:
    """What lambda may become at a site: the user's number, or the numbers that auto chooses from."""
    given = arguments.lambdas[site]
    if given is not None:
        return (given[0] if len(given) == 1 else given[layer],)
    # A constant from weights follows lambda before the attention: it stays at the smallest
    estimates_from_weights = arguments.variance_estimator in ("published", "uniform_attention")
    return LAMBDAS[arguments.basis][: 1 if estimates_from_weights else None]


def first_choice(arguments: GraftArguments) -> dict:
    """The smallest choice of all, as fields of the configuration: what it refuses is refused before any work."""
    fields = {}
    for site in NORM_OF_SITE:
        given = arguments.lambdas[site]
        fields[f"{site}_lambda"] = LAMBDAS[arguments.basis][0] if given is None else _one_or_list(given)
    return fields | {"exact_variance_layers": arguments.exact_layers or []}


def measured_costs(sites: Sites, bases: dict[str, Basis], windows: Tensor | None) -> Costs:
    """What each candidate costs; nothing is measured where nothing is left to choose."""
    if sites.arguments.is_auto:
        return site_costs(sites, bases, windows)
    return {key: dict.fromkeys(options, 0.0) for key, options in sites.items()}


def site_costs(sites: Sites, bases: dict[str, Basis], windows: Tensor) -> Costs:
    """Nats a token that each candidate alone would cost, in one forward and one backward pass, a window at a time."""
    model = sites.source.model
    totals: Costs = {key: dict.fromkeys(options, 0.0) for key, options in sites.items()}
    block_input: dict[int, Tensor] = {}

    def see(layer: int, site: Site, x: Tensor, y: Tensor):
        own = mean_square(x.detach())
        if site == "attention":
            block_input[layer] = own
        first = block_input[layer]
        # Blocks are run twice where activations are not kept; only one of the two has a gradient
        if y.requires_grad:
            y.register_hook(lambda g: add((layer, site), x.detach(), own, first, g))

    def add(key: SiteKey, x: Tensor, own: Tensor, first: Tensor, g: Tensor):
        gamma = sites.gammas[key].to(x.device).float()
        for name, basis in bases.items():
            state, y = sites.outputs(key, basis, x, own)
            gradient = basis.gradient(g.float(), gamma)
            for option, grafted in sites[key].items():
                if option.basis == name:
                    t = sites.tanh(grafted, state, own, first)
                    error = grafted.gain.to(t.device, t.dtype) * t - y
                    totals[key][option] += (gradient * error).sum(-1).double().pow(2).sum().item() / 2

    generator = torch.Generator(input_device(model)).manual_seed(sites.arguments.seed)
    with watch_norms(model, see), _blocks_recomputed(model):
        for window in track(windows[:NUM_COST_WINDOWS].split(1), description="measuring sensitivity"):
            _backward_of_drawn_tokens(model, window, generator)
    num_tokens = windows[:NUM_COST_WINDOWS].numel()
    return {key: {option: cost / num_tokens for option, cost in costs.items()} for key, costs in totals.items()}


@contextmanager
def _blocks_recomputed(model: PreTrainedModel):
    """Keeps no activations but the blocks' inputs, so that a backward pass fits where a forward one did."""
    model.requires_grad_(False)
    forwards = {layer: layer.forward for layer in model.model.layers}
    for layer, forward in forwards.items():
        layer.forward = partial(checkpoint, forward, use_reentrant=False)
    try:
        yield
    finally:
        for layer, forward in forwards.items():
            layer.forward = forward


@torch.enable_grad()
def _backward_of_drawn_tokens(model: PreTrainedModel, window: Tensor, generator: torch.Generator):
    embedded = model.model.embed_tokens(window.to(input_device(model))).detach().requires_grad_()
    logits = model(inputs_embeds=embedded, use_cache=False).logits[0].float()
    drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)
    logits.log_softmax(-1).gather(-1, drawn).sum().backward()


@dataclass
class Choice:
    """A candidate a site, and what all of them cost by prediction; `by_hand`: what the user's own part costs at least;
    `target`: what all of them were allowed to cost, that part included. All in nats a token."""

    options: dict[SiteKey, Candidate]
    predicted: float
    by_hand: float
    target: float

    def exact_layers(self) -> list[int]:
        return sorted(layer for (layer, site), option in self.options.items() if site == "mlp" and option.is_exact)


def choose(costs: Costs, arguments: GraftArguments, target: float) -> Choice:
    """As few exact layers as `target` nats a token allow at the smallest lambdas, then lambdas as large as it allows.

    The last tenth of the target is left to the predictions' errors. What the user set by hand is spent besides. Layers
    are made exact in the order of what that saves; lambdas are raised in the order of what a raise costs.
    """
    mine = {key: {option: costs[key][option] for option in open_options(arguments, key[1], key[0])} for key in costs}
    lambdas = {key: open_lambdas(arguments, key[1], key[0]) for key in mine}
    by_hand = sum(min(mine[key].values()) for key in mine if _is_by_hand(arguments, *key))
    target += by_hand
    # The smallest lambda, under an estimate where there is one
    options = {key: next(iter(open_here)) for key, open_here in mine.items()}

    def cost(key: SiteKey, option: Candidate) -> float:
        return mine[key][option]

    total = sum(cost(key, option) for key, option in options.items())
    exact = {key: option._replace(is_exact=True) for key, option in options.items() if not option.is_exact}
    savings = {
        key: cost(key, options[key]) - cost(key, option) for key, option in exact.items() if option in mine[key]
    }
    for key in sorted(savings, key=savings.__getitem__, reverse=True):
        if total <= target:
            break
        options[key] = exact[key]
        total -= savings[key]

    def raises() -> list[tuple[float, float, SiteKey, Candidate]]:
        """(cost a unit of log lambda, cost, site, candidate) of every raise by one step that the target still allows."""
        found = []
        for key, option in options.items():
            if larger := [lam for lam in lambdas[key] if lam > option.lam]:
                raised = option._replace(lam=larger[0])
                rise = cost(key, raised) - cost(key, option)
                if total + rise <= MARGIN * target:
                    found.append((rise / math.log(raised.lam / option.lam), rise, key, raised))
        return found

    while found := raises():
        _, rise, key, raised = min(found)
        options[key] = raised
        total += rise
    return Choice(options, total, by_hand, target)


def _is_by_hand(arguments: GraftArguments, layer: int, site: Site) -> bool:
    estimate_by_hand = site == "mlp" and arguments.exact_layers is not None and layer not in arguments.exact_layers
    return arguments.lambdas[site] is not None or estimate_by_hand


def graft_of(choice: Choice, sites: Sites) -> Graft:
    """The chosen candidates with their parameters, and the configuration that they make."""
    chosen = {key: sites[key][option] for key, option in choice.options.items()}
    lambdas = {site: [chosen[layer, site].lam for layer, kind in chosen if kind == site] for site in NORM_OF_SITE}
    config = bhyt_config(
        sites.base,
        sites.arguments,
        attention_lambda=_one_or_list(lambdas["attention"]),
        mlp_lambda=_one_or_list(lambdas["mlp"]),
        exact_variance_layers=[] if sites.arguments.variance_estimator == "exact" else choice.exact_layers(),
    )
    return Graft(config, chosen)


def _one_or_list(numbers: list[float]) -> float | list[float]:
    return numbers[0] if len(set(numbers)) == 1 else numbers


def curve(costs: Costs) -> list[dict]:
    """Cost in nats a token of one lambda at all sites, their statistics exact, for each basis."""
    rows = []
    for basis, lambdas in CURVE.items():
        for lam in sorted({*lambdas, *LAMBDAS[basis]}):
            option = Candidate(basis, lam, True)
            if all(option in options for options in costs.values()):
                rows.append({"basis": basis, "lambda": lam, "kl": sum(options[option] for options in costs.values())})
    return rows


def explain(choice: Choice, costs: Costs, arguments: GraftArguments) -> dict | None:
    """The choice as it stands in the report; None where nothing was left to choose."""
    if not arguments.is_auto:
        return None
    lambdas = [option.lam for option in choice.options.values()]
    exact = choice.exact_layers()
    ranked = sorted(choice.options, key=lambda key: costs[key][choice.options[key]], reverse=True)
    why = [
        f"Predicted together: {choice.predicted:.5f} nats a token. A site's cost is what it alone would add to "
        "KL(source, graft), from one backward pass through the source.",
        "",
        "| layer | site | lambda | second statistic | cost, nats a token | at the smallest lambda: exact | estimated |",
        "|---|---|---|---|---|---|---|",
    ]
    for key in ranked:
        option, smallest = choice.options[key], open_lambdas(arguments, key[1], key[0])[0]
        cells = [str(key[0]), key[1], f"{option.lam:g}", "exact" if option.is_exact else "estimated"]
        cells.append(f"{costs[key][option]:.2e}")
        for is_exact in (True, False):
            cost = costs[key].get(Candidate(arguments.basis, smallest, is_exact))
            cells.append("" if cost is None else f"{cost:.2e}")
        why.append("| " + " | ".join(cells) + " |")
    return {
        "sentence": f"{len(exact)} exact layers, lambda {min(lambdas):g} to {max(lambdas):g} (median {median(lambdas):g}), "
        f"predicted to cost {choice.predicted:.4f} nats a token",
        "predicted_nats_per_token": choice.predicted,
        "target_nats_per_token": choice.target,
        "curve": curve(costs),
        "why": why,
    }
