"""What auto chooses, and whether the costs that it goes by are the costs."""

import json

import pytest
import torch
from test_graft import graft, save_source

from conversion.__main__ import both_bases
from conversion.arguments import GraftArguments, parse
from conversion.calibration import Candidate
from conversion.choice import LAMBDAS, candidates, choose, curve, graft_of, measured_costs, site_costs
from conversion.graft import Sites, fit_sites
from conversion.source import read_source


SAMPLED = ["--window_length", "48", "--num_calibration_tokens", "384", "--num_report_tokens", "384"]


@pytest.fixture
def opened(tmp_path):
    """Costs of all candidates of a tiny model, on text whose tokens matter to it."""
    save_source(tmp_path / "source")

    def open_with(*flags):
        arguments = parse(GraftArguments, [str(tmp_path / "source"), str(tmp_path / "out"), *flags])
        source = read_source(arguments.source)
        sites = Sites(source, source, arguments, candidates(arguments, 3))
        bases = both_bases(source, 0)
        windows = torch.randint(3, 250, (4, 48), generator=torch.Generator().manual_seed(0))
        fit_sites(sites, bases, windows)
        return arguments, sites, bases, windows

    return open_with


def test_a_candidates_cost_is_the_kl_that_it_alone_causes(opened):
    """Measured by putting the candidate's output in the place of the norm's."""
    arguments, sites, bases, windows = opened("--basis", "original")
    # Many draws of the tokens, so that the estimate is worth comparing
    draws = []
    for seed in range(12):
        arguments.seed = seed
        draws.append(site_costs(sites, bases, windows))
    for key, option in (
        ((0, "attention"), Candidate("original", 2.0, True)),
        ((1, "mlp"), Candidate("original", 0.125, False)),
        ((2, "mlp"), Candidate("original", 2.0, True)),
    ):
        predicted = sum(costs[key][option] for costs in draws) / len(draws)
        measured = kl_of(sites, key, sites[key][option], windows)
        assert measured > 1e-7 and predicted == pytest.approx(measured, rel=0.5), (key, option)


def kl_of(sites, key, grafted, windows) -> float:
    """KL from the source, nats a token, with one site grafted."""
    model, (layer, site) = sites.source.model, key
    block = model.model.layers[layer]
    norm = block.input_layernorm if site == "attention" else block.post_attention_layernorm
    seen = {}

    def see_block_input(module, inputs):
        seen["ms"] = inputs[0].pow(2).mean(-1, keepdim=True)

    def replace(module, inputs, output):
        x = inputs[0]
        return grafted.gain.float() * sites.tanh(grafted, x, x.pow(2).mean(-1, keepdim=True), seen["ms"])

    with torch.no_grad():
        expected = model(windows, use_cache=False).logits.log_softmax(-1)
        handles = [block.register_forward_pre_hook(see_block_input), norm.register_forward_hook(replace)]
        actual = model(windows, use_cache=False).logits.log_softmax(-1)
    for handle in handles:
        handle.remove()
    return (expected.exp() * (expected - actual)).sum(-1).mean().item()


def test_costs_leave_the_model_as_it_was(opened):
    arguments, sites, bases, windows = opened()
    model = sites.source.model
    with torch.no_grad():
        before = model(windows).logits
    site_costs(sites, bases, windows)
    with torch.no_grad():
        assert torch.equal(model(windows).logits, before)
    assert not model.training and not any(layer.training for layer in model.model.layers)
    assert not any(norm._forward_hooks for norm in model.modules())


def test_a_larger_target_never_takes_more_exact_layers_or_smaller_lambdas(opened):
    arguments, sites, bases, windows = opened()
    costs = measured_costs(sites, bases, windows)
    total = sum(min(options.values()) for options in costs.values())
    choices = [choose(costs, arguments, target) for target in (0.0, 1.5 * total, 4 * total, 100 * total, 1e9)]
    numbers = [len(choice.exact_layers()) for choice in choices]
    assert numbers == sorted(numbers, reverse=True) and numbers[0] == 3 and numbers[-1] == 0
    assert {option.lam for option in choices[0].options.values()} == {1.0}
    assert {option.lam for option in choices[-1].options.values()} == {2.0}
    for choice in choices:
        spent = sum(costs[key][option] for key, option in choice.options.items())
        assert choice.predicted == pytest.approx(spent)


def test_layers_are_made_exact_in_the_order_of_what_that_saves(opened):
    arguments, sites, bases, windows = opened()
    costs = measured_costs(sites, bases, windows)
    saving = {
        layer: costs[layer, "mlp"][Candidate("rotated", 1.0, False)]
        - costs[layer, "mlp"][Candidate("rotated", 1.0, True)]
        for layer in range(3)
    }
    floor = sum(options[Candidate("rotated", 1.0, site == "attention")] for (_, site), options in costs.items())
    best = max(saving, key=saving.__getitem__)
    assert choose(costs, arguments, floor - 0.5 * saving[best]).exact_layers() == [best]


def test_what_is_set_by_hand_is_kept_and_paid_for_besides(opened):
    flags = ["--attention_lambda", "2", "--exact_variance_layers", "none"]
    arguments, sites, bases, windows = opened(*flags)
    choice = choose(measured_costs(sites, bases, windows), arguments, 0.0)
    assert choice.exact_layers() == [] and choice.by_hand > 0
    assert {option.lam for (_, site), option in choice.options.items() if site == "attention"} == {2.0}


def test_lambdas_of_auto_stay_within_their_limits():
    assert LAMBDAS["rotated"][0] == 1.0 and max(map(max, LAMBDAS.values())) == 2.0
    # Each is a number that bf16 holds, so that a prediction speaks of what is saved
    for lam in {*LAMBDAS["rotated"], *LAMBDAS["original"]}:
        assert torch.tensor(lam).bfloat16().item() == lam


def test_the_curve_covers_both_bases_and_rises(opened):
    arguments, sites, bases, windows = opened()
    rows = curve(measured_costs(sites, bases, windows))
    for basis in ("rotated", "original"):
        costs = [row["kl"] for row in rows if row["basis"] == basis]
        assert len(costs) >= 3 and costs == sorted(costs)


def test_a_graft_without_any_choice_works_and_says_what_it_chose(tmp_path):
    save_source(tmp_path / "source")
    from conversion.__main__ import graft as run

    run(parse(GraftArguments, [str(tmp_path / "source"), str(tmp_path / "out"), *SAMPLED]))
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert report["verdict"]["passed"] and report["verdict"]["allowed"] == 0.005
    assert min(site["lam"] for site in report["sites"]) >= 1 and report["rotation"]["seed"] == 0
    assert report["choice"]["curve"] and "predicted to cost" in report["choice"]["sentence"]
    assert (tmp_path / "out" / "conversion_report.png").stat().st_size > 10_000
    words = (tmp_path / "out" / "conversion_report.md").read_text()
    assert "What was chosen, and why" in words and "conversion_report.png" in words


def test_a_choice_is_what_is_saved(tmp_path, opened):
    arguments, sites, bases, windows = opened("--basis", "original")
    choice = choose(measured_costs(sites, bases, windows), arguments, 1e-3)
    grafted = graft_of(choice, sites)
    for (layer, site), option in choice.options.items():
        assert grafted.config.site_lambda(site, layer) == option.lam
    assert grafted.config.exact_variance_layers == choice.exact_layers()


def test_original_basis_with_auto_keeps_every_other_weight(tmp_path):
    from safetensors.torch import load_file

    save_source(tmp_path / "source", tie_word_embeddings=True)
    flags = ["--attention_lambda", "auto", "--mlp_lambda", "auto", "--exact_variance_layers", "auto", "--force"]
    model = graft(tmp_path / "source", tmp_path / "out", *flags)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "out"))
    for name in before:
        if "layernorm" not in name:
            assert torch.equal(after[name], before[name]), name
    assert model.lm_head.weight is model.model.embed_tokens.weight
