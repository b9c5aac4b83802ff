"""Healing: what it trains, what it leaves alone, and that it goes on where it was stopped."""

import json

import pytest
import torch
from conftest import REPOSITORY
from safetensors.torch import load_file
from test_choice import SAMPLED
from test_graft import edit_json, save_source

from conversion import __main__ as command
from conversion.arguments import GraftArguments, HealArguments, parse
from conversion.heal import Distillation
from modeling_bhyt import BHyTLlamaForCausalLM


TEXT = ["--window_length", "48", "--num_report_tokens", "192", "--report_text", str(REPOSITORY / "LICENSE")]
COARSE = ["--attention_lambda", "2", "--mlp_lambda", "2", "--exact_variance_layers", "none"]
HEAL_TEXT = ["--heal_text", str(REPOSITORY / "docs" / "LOG.md"), "--heal_tokens", "2000"]


@pytest.fixture
def grafted(tmp_path):
    save_source(tmp_path / "source", initializer_range=0.1)
    words = [str(tmp_path / "source"), str(tmp_path / "graft"), *SAMPLED, *TEXT, *COARSE]
    command.graft(parse(GraftArguments, words))
    return tmp_path


def heal(folder, *flags, output="healed"):
    words = [str(folder / "graft"), str(folder / output), "--teacher", str(folder / "source"), *TEXT, *HEAL_TEXT]
    command.heal(parse(HealArguments, [*words, "--learning_rate", "0.01", "--force", *flags]))
    report = json.loads((folder / output / "conversion_report.json").read_text())
    return report, load_file(folder / output / "model.safetensors")


def is_norm(name: str) -> bool:
    return "norm" in name


def test_healing_lowers_the_kl_and_trains_norm_parameters_alone(grafted):
    report, after = heal(grafted)
    before = load_file(grafted / "graft" / "model.safetensors")
    assert report["kl_nats_per_token"] < 0.8 * report["healing"]["before"]["kl_nats_per_token"]
    assert set(after) == set(before)
    for name in before:
        assert torch.equal(after[name], before[name]) != is_norm(name), name
        if name.endswith(("variance_ratio", "variance_offset")):
            assert after[name] >= 0
    assert report["healing"]["num_tokens"] == 42 * 48 and "healed" in (grafted / "healed" / "README.md").read_text()
    # The constants are frozen again, and the folder says so
    model = BHyTLlamaForCausalLM.from_pretrained(grafted / "healed")
    assert not model.config.learnable_variance
    assert not any(p.requires_grad for name, p in model.named_parameters() if "variance" in name)
    assert sorted(path.name for path in grafted.iterdir()) == ["graft", "healed", "source"]


def test_a_frozen_lambda_stays(grafted):
    _, after = heal(grafted, "--freeze_lambda", "true")
    lambdas = [tensor.item() for name, tensor in after.items() if name.endswith(".lam")]
    assert len(lambdas) == 6 and set(lambdas) == {2.0}


@pytest.mark.parametrize("train", ["lora", "all"])
def test_lora_and_all_train_the_projections_too(grafted, train):
    report, after = heal(grafted, "--train", train)
    before = load_file(grafted / "graft" / "model.safetensors")
    assert set(after) == set(before) and report["healing"]["train"] == train
    for name in before:
        moved = not torch.equal(after[name], before[name])
        is_projection = "_proj" in name
        assert moved or (train == "lora" and not is_projection and not is_norm(name)), name
    assert report["kl_nats_per_token"] < report["healing"]["before"]["kl_nats_per_token"]


def test_lambda_is_raised_to_its_target_in_steps(grafted):
    _, after = heal(grafted, "--target_lambda", "3", "--freeze_lambda", "true", "--lambda_steps", "3")
    lambdas = [tensor.item() for name, tensor in after.items() if name.endswith(".lam")]
    assert lambdas == pytest.approx([3.0] * 6, rel=1e-5)


def test_a_stopped_run_is_resumed_and_ends_where_an_unbroken_one_does(grafted, monkeypatch):
    report, unbroken = heal(grafted, "--save_steps", "3", output="unbroken")
    original = Distillation.compute_loss

    def stop(self, *arguments, **keywords):
        if self.state.global_step == 7:
            raise KeyboardInterrupt
        return original(self, *arguments, **keywords)

    monkeypatch.setattr(Distillation, "compute_loss", stop)
    with pytest.raises(KeyboardInterrupt):
        heal(grafted, "--save_steps", "3", output="resumed")
    assert not (grafted / "resumed").exists()
    monkeypatch.setattr(Distillation, "compute_loss", original)
    with pytest.raises(ValueError, match="go on with --resume, or remove it"):
        heal(grafted, "--save_steps", "3", output="resumed")
    _, resumed = heal(grafted, "--save_steps", "3", "--resume", "true", output="resumed")
    for name in unbroken:
        torch.testing.assert_close(resumed[name], unbroken[name], rtol=1e-4, atol=1e-5)
    assert not (grafted / "resumed.checkpoints").exists()
    with pytest.raises(ValueError, match="no checkpoint to resume from"):
        heal(grafted, "--resume", "true", output="again")


def test_graft_heals_in_one_command(grafted):
    words = [str(grafted / "source"), str(grafted / "both"), *SAMPLED, *TEXT, *COARSE, *HEAL_TEXT, "--force"]
    command.graft(parse(GraftArguments, words))
    report = json.loads((grafted / "both" / "conversion_report.json").read_text())
    assert report["kl_nats_per_token"] < report["healing"]["before"]["kl_nats_per_token"]


def test_another_teacher_and_a_diverging_run_are_refused(grafted):
    save_source(grafted / "other", seed=5)
    words = [str(grafted / "graft"), str(grafted / "out"), "--teacher", str(grafted / "other"), *TEXT, *HEAL_TEXT]
    with pytest.raises(ValueError, match="is not what this model was made from"):
        command.heal(parse(HealArguments, words))
    with pytest.raises(ValueError, match="take a smaller learning_rate than 1e"):
        heal(grafted, "--learning_rate", "1e30", output="out")
    assert not (grafted / "out").exists()


def test_dtypes_and_ties_survive_healing(tmp_path):
    save_source(tmp_path / "source", dtype=torch.bfloat16, tie_word_embeddings=True)
    words = [str(tmp_path / "source"), str(tmp_path / "graft"), *SAMPLED, *TEXT, *COARSE, "--basis", "original"]
    command.graft(parse(GraftArguments, words))
    _, after = heal(tmp_path)
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16} and "lm_head.weight" not in after
    assert json.loads((tmp_path / "healed" / "config.json").read_text())["dtype"] == "bfloat16"


def test_an_invalid_generation_config_is_repaired_before_hours_of_training(tmp_path):
    save_source(tmp_path / "source")
    edit_json(tmp_path / "source" / "generation_config.json", do_sample=False, temperature=0.6, top_p=0.9)
    words = [str(tmp_path / "source"), str(tmp_path / "graft"), *SAMPLED, *TEXT, *COARSE]
    command.graft(parse(GraftArguments, words))
    heal(tmp_path)
    model = BHyTLlamaForCausalLM.from_pretrained(tmp_path / "healed")
    model.save_pretrained(tmp_path / "again")
    assert model.generation_config.temperature in (None, 1.0)
