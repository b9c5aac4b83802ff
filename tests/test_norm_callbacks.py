"""What a run says about its norms, and constants that follow the weights: plain, under LoRA, recomputed, resumed."""

import csv
import json
from math import log, sqrt
from types import SimpleNamespace

import pytest
import torch
from chat_bases import save_base
from chat_runs import logged, weights, write_rows
from conftest import tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from modeling_bhyt import BHyTLlamaForCausalLM
from modeling_bhyt.normalization_bhyt import fit_ratio_and_offset, fit_sums, mean_square
from sft.norm_callbacks import RefreshConstants


LOGGED = [
    "lambda_min",
    "lambda_max",
    "depth_effective_max",
    "depth_limit",
    "saturated_share_max",
    "estimator_log_error_max",
]
EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}


def table(folder) -> list[dict[str, str]]:
    with (folder / "training_log.csv").open() as file:
        return list(csv.DictReader(file))


@torch.no_grad()
def mean_squares(model, batches) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """(block input, second site) of each layer over real tokens but each document's first."""
    found: dict[int, list] = {n: [] for n in range(model.config.num_hidden_layers)}
    for batch in batches:
        counted = batch["attention_mask"].bool() if "attention_mask" in batch else batch["position_ids"] != 0
        counted = counted.clone()
        if "attention_mask" in batch:
            counted[:, 0] = False
        handles = []
        for n, layer in enumerate(model.model.layers):

            def hook(module, arguments, output, n=n, counted=counted):
                first, second = arguments[1], mean_square(arguments[0])
                found[n].append((first.squeeze(-1)[counted], second.squeeze(-1)[counted]))

            handles.append(layer.post_attention_layernorm.register_forward_hook(hook))
        model(
            **{name: batch[name] for name in ("input_ids", "attention_mask", "position_ids") if name in batch},
            use_cache=False,
        )
        for handle in handles:
            handle.remove()
    return {n: tuple(torch.cat(part) for part in zip(*pairs)) for n, pairs in found.items()}


def test_every_logged_loss_comes_with_what_the_norms_were_in_that_step(fine_tune, base, batches):
    folder = fine_tune(max_steps=2, **EVERY_STEP)
    assert all(len(logged(folder, f"norms/{name}")) == 2 for name in LOGGED)
    model = BHyTLlamaForCausalLM.from_pretrained(base)
    lambdas = [norm.lam.item() for name, norm in model.named_modules() if hasattr(norm, "lam")]
    assert logged(folder, "norms/lambda_min")[0] == pytest.approx(min(lambdas))
    assert logged(folder, "norms/lambda_max")[0] == pytest.approx(max(lambdas))
    bounds = model.depth_bounds()
    assert logged(folder, "norms/depth_effective_max")[0] == pytest.approx(max(bound.effective for bound in bounds))
    assert logged(folder, "norms/depth_limit")[0] == pytest.approx(bounds[0].limit)
    errors = []
    for n, (first, second) in mean_squares(model, batches[:1]).items():
        r, c = model.variance_constants()[n]
        errors.append(sqrt(torch.log((r * first + c) / second).double().pow(2).mean()))
    assert logged(folder, "norms/estimator_log_error_max")[0] == pytest.approx(max(errors), rel=1e-4)
    assert [row["norms/lambda_max"] for row in table(folder)][0] == str(logged(folder, "norms/lambda_max")[0])


def test_saturation_is_the_share_beyond_the_bound_at_the_worst_site(fine_tune, tmp_path):
    mild, wild = (save_base(tmp_path / f"lambda {number}", attention_lambda=number) for number in (0.1, 1e4))
    assert logged(fine_tune("mild", base=mild, **EVERY_STEP), "norms/saturated_share_max")[0] == 0
    assert logged(fine_tune("wild", base=wild, **EVERY_STEP), "norms/saturated_share_max")[0] > 0.95


@pytest.mark.parametrize(
    "options", [{"logging_steps": 2}, {"logging_strategy": "epoch"}, {"logging_steps": 3, "logging_first_step": True}]
)
def test_norms_are_watched_in_logged_steps_alone(fine_tune, options):
    options = {"per_device_train_batch_size": 2, "max_steps": 4, **EVERY_STEP, **options}
    folder = fine_tune(**options)
    entries = [entry for entry in table(folder) if entry["loss"]]
    assert entries and all(entry["norms/lambda_max"] for entry in entries)
    assert sum(bool(entry["norms/lambda_max"]) for entry in table(folder)) == len(entries)


def test_a_plain_llama_has_no_norms_to_speak_of_and_nothing_to_refresh(fine_tune, tmp_path):
    plain = save_base(tmp_path / "plain", plain=True)
    assert not any(key.startswith("norms/") for row in table(fine_tune(base=plain)) for key in row)
    assert "this base estimates no variance" in fine_tune("other", base=plain, code=2, refresh_constants_every=1)
    exact = save_base(tmp_path / "exact", variance_estimator="exact")
    assert "this base estimates no variance" in fine_tune("other", base=exact, code=2, refresh_constants_every=1)
    trained = save_base(tmp_path / "trained", learnable_variance=True)
    assert "are trained" in fine_tune("other", base=trained, code=2, refresh_constants_every=1)


@pytest.mark.parametrize("estimator", ["uniform_attention", "published"])
@pytest.mark.parametrize(
    "lora",
    [{}, {"use_peft": True, "lora_r": 4}, {"use_peft": True, "lora_r": 4, "train_norms": True}],
    ids=["full", "lora", "lora and norms"],
)
def test_constants_from_weights_are_those_of_the_finished_model(fine_tune, tmp_path, lora, estimator):
    start = save_base(tmp_path / "start", variance_estimator=estimator)
    folder = fine_tune(base=start, refresh_constants_every=1, **lora, **EVERY_STEP)
    model = BHyTLlamaForCausalLM.from_pretrained(folder)
    stored = model.variance_constants()
    assert stored != BHyTLlamaForCausalLM.from_pretrained(start).variance_constants()
    for n, (_, new) in model.refresh_variance_constants().items():
        assert stored[n][1] == pytest.approx(new, rel=1e-6)
    for key in ("constants/c_old_median", "constants/c_new_median"):
        assert len(logged(folder, key)) == 2
    kept = json.loads((folder / "variance_constants.json").read_text())
    assert {int(n): tuple(pair) for n, pair in kept["constants"].items()} == stored
    assert [entry["step"] for entry in kept["history"] if entry["layer"] == 1] == [1, 2]
    assert kept["history"][-1]["c_new"] == stored[model.config.estimated_layers[-1]][1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"packing": True, "max_length": 64},
    ],
    ids=["plain", "recomputed", "accumulated", "packed"],
)
def test_fitted_constants_are_those_of_the_tokens_of_the_step(fine_tune, tmp_path, batches, options):
    rows = write_rows(tmp_path / "uneven.jsonl", [["Q", "a" * (3 + 5 * n)] for n in range(4)])
    start = save_base(tmp_path / "start", variance_estimator="fitted")
    folder = fine_tune(base=start, rows=rows, max_steps=1, refresh_constants_every=1, **EVERY_STEP, **options)
    model = BHyTLlamaForCausalLM.from_pretrained(start)
    for n, pair in mean_squares(model, batches).items():
        expected = fit_ratio_and_offset(fit_sums(*pair))
        actual = BHyTLlamaForCausalLM.from_pretrained(folder).variance_constants()[n]
        assert actual == pytest.approx(expected, rel=1e-3)


def test_fitted_constants_lessen_the_error_that_the_next_step_logs(fine_tune, tmp_path):
    start = save_base(tmp_path / "start", variance_estimator="fitted")
    model = BHyTLlamaForCausalLM.from_pretrained(start)
    model.set_variance_constants(dict.fromkeys(model.variance_constants(), (5.0, 0.0)))
    model.save_pretrained(start)
    folder = fine_tune(base=start, max_steps=2, learning_rate=1e-6, refresh_constants_every=1, **EVERY_STEP)
    before, after = logged(folder, "norms/estimator_log_error_max")
    assert before == pytest.approx(log(5), abs=0.3) and after < before / 4


@pytest.mark.parametrize(
    ("estimator", "lora"),
    [("uniform_attention", {}), ("fitted", {"use_peft": True, "lora_r": 4})],
    ids=["full", "lora"],
)
def test_a_resumed_run_goes_on_with_refreshed_constants(fine_tune, tmp_path, estimator, lora):
    start = save_base(tmp_path / "start", variance_estimator=estimator)
    options = {"base": start, "per_device_train_batch_size": 2, "refresh_constants_every": 2, **EVERY_STEP, **lora}
    whole = fine_tune("whole", **options)
    part = fine_tune("part", **options)
    # The constants of step 3 are those of the refresh in step 2: a run that forgot them ends elsewhere
    (part / "model.safetensors").unlink()
    resumed = fine_tune("part", resume_from_checkpoint=part / "checkpoint-3", **options)
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(resumed)[name], tensor), name
    history = [json.loads((folder / "variance_constants.json").read_text())["history"] for folder in (whole, resumed)]
    assert history[0] == history[1]


def test_the_best_adapter_is_merged_with_the_constants_of_its_own_step(fine_tune, tmp_path, rows):
    options = {"use_peft": True, "lora_r": 4, "refresh_constants_every": 1, "num_train_epochs": 2}
    options |= {"eval_data": rows, "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    # The worse by its loss is called the best, so that it is not the last
    folder = fine_tune(metric_for_best_model="eval_loss", greater_is_better=True, **options)
    first, last = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    losses = logged(folder, "eval_loss")
    assert losses[0] > losses[1]
    kept = {
        n: tuple(pair) for n, pair in json.loads((first / "variance_constants.json").read_text())["constants"].items()
    }
    assert kept != {
        n: tuple(pair) for n, pair in json.loads((last / "variance_constants.json").read_text())["constants"].items()
    }
    merged = AutoModelForCausalLM.from_pretrained(folder).variance_constants()
    assert {str(n): pair for n, pair in merged.items()} == kept
    assert (
        load_file(folder / "adapter" / "adapter_model.safetensors").keys()
        == load_file(first / "adapter_model.safetensors").keys()
    )


@pytest.mark.parametrize(
    ("estimator", "quantized", "zero3", "said"),
    [
        ("published", True, False, "cannot be read from 4 or 8 bits: load the base in floating point"),
        ("fitted", True, False, None),
        ("published", False, True, "ZeRO-3 keeps the weights where they cannot be read: use FSDP2 or ZeRO-2"),
        ("fitted", False, True, "ZeRO-3 keeps the weights where they cannot be read: use FSDP2 or ZeRO-2"),
    ],
)
def test_weights_that_cannot_be_read_are_refused_at_the_start(monkeypatch, estimator, quantized, zero3, said):
    monkeypatch.setattr("sft.norm_callbacks.is_deepspeed_zero3_enabled", lambda: zero3)
    model = tiny_model(variance_estimator=estimator)
    model.is_quantized = quantized
    if said is None:
        RefreshConstants(SimpleNamespace(model=model), 3)
        return
    with pytest.raises(ValueError, match=f"refresh_constants_every is 3, but .*{said}; or leave it out"):
        RefreshConstants(SimpleNamespace(model=model), 3)


def test_an_adapter_alone_cannot_carry_constants(fine_tune):
    options = {"use_peft": True, "lora_r": 4, "merge_adapter": False, "refresh_constants_every": 1}
    assert "an adapter alone does not carry" in fine_tune(code=2, **options)
    fine_tune(train_norms=True, **options)
