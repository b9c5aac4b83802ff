"""The way back to a plain Llama, and what is refused on it."""

import json

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from conftest import run_without_package, tiny_llama, tiny_model
from safetensors.torch import load_file
from test_graft import QUICK, edit_json, graft, logits, save_source
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from conversion import __main__ as command
from conversion.arguments import ExportArguments, parse


TEXT = QUICK[: QUICK.index("--calibration_text") + 2]


def export(model, output, *flags):
    command.export(parse(ExportArguments, [str(model), str(output), *TEXT, *flags]))
    return json.loads((output / "conversion_report.json").read_text())


def save_bhyt(folder, norm_type, **overrides):
    model = tiny_model(norm_type, **overrides)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


@pytest.mark.parametrize("basis", ["original", "rotated"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_graft_comes_back_as_its_source(tmp_path, basis, tied):
    source = save_source(tmp_path / "source", tie_word_embeddings=tied)
    graft(tmp_path / "source", tmp_path / "bhyt", "--basis", basis, "--variance_estimator", "exact")
    report = export(tmp_path / "bhyt", tmp_path / "plain")
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "plain")
    assert (logits(plain) - logits(source)).abs().max() < 0.02 * logits(source).abs().max()
    assert report["verdict"]["passed"] and report["kl_nats_per_token"] < 1e-3
    assert report["tensors"]["replaced"] == 6 and len(report["tensors"]["left_out"]) == 6
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["model_type"] == "llama" and config["architectures"] == ["LlamaForCausalLM"]
    assert "auto_map" not in config and "kappa" not in config and not list((tmp_path / "plain").glob("*.py"))
    assert not any(
        name.endswith((".lam", "variance_ratio")) for name in load_file(tmp_path / "plain" / "model.safetensors")
    )


def test_lns_is_exact(tmp_path):
    model = save_bhyt(tmp_path / "lns", "lns")
    report = export(tmp_path / "lns", tmp_path / "plain")
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "plain")
    assert (logits(plain) - logits(model)).abs().max() < 1e-5 * logits(model).abs().max()
    assert abs(report["kl_nats_per_token"]) < 1e-6


def test_rmsnorm_is_bit_equal(tmp_path):
    model = save_bhyt(tmp_path / "rmsnorm", "rmsnorm")
    export(tmp_path / "rmsnorm", tmp_path / "plain")
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path / "plain")), logits(model))


@pytest.mark.parametrize("norm_type", ["bhyt", "bhyt_star"])
@pytest.mark.parametrize("final_lambda", [None, 1.0])
def test_gains_are_refitted_at_every_norm(tmp_path, norm_type, final_lambda):
    """At a small lambda the tanh is linear, so that an RMSNorm with the fitted gain is the same (but for the mean)."""
    model = save_bhyt(tmp_path / "bhyt", norm_type, attention_lambda=0.05, mlp_lambda=0.05, final_lambda=final_lambda)
    report = export(tmp_path / "bhyt", tmp_path / "plain", "--force")
    assert report["kl_nats_per_token"] < 0.05
    gain = load_file(tmp_path / "plain" / "model.safetensors")["model.layers.1.input_layernorm.weight"]
    norm = model.model.layers[1].input_layernorm
    expected = norm.weight * norm.lam / 10
    torch.testing.assert_close(gain, expected.detach(), rtol=0.2, atol=1e-4)


@pytest.mark.parametrize("norm_type", ["dyt", "peri_ln"])
def test_norms_that_no_llama_computes_are_refused(tmp_path, norm_type):
    save_bhyt(tmp_path / "bhyt", norm_type)
    with pytest.raises(ValueError, match=f"norm_type '{norm_type}', which no plain Llama computes"):
        export(tmp_path / "bhyt", tmp_path / "plain")
    assert not (tmp_path / "plain").exists()


def test_an_export_above_the_budget_is_refused_unless_forced(tmp_path):
    save_bhyt(tmp_path / "bhyt", "bhyt", attention_lambda=30.0, mlp_lambda=30.0)
    with pytest.raises(command.BudgetMissed, match="nothing was saved"):
        export(tmp_path / "bhyt", tmp_path / "plain", "--budget", "1e-6")
    assert not (tmp_path / "plain").exists()
    assert not export(tmp_path / "bhyt", tmp_path / "plain", "--budget", "1e-6", "--force")["verdict"]["passed"]


def test_stock_transformers_loads_the_export_without_this_package(tmp_path):
    save_source(tmp_path / "source")
    graft(tmp_path / "source", tmp_path / "bhyt")
    export(tmp_path / "bhyt", tmp_path / "plain", "--force")
    torch.save(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")), tmp_path / "expected.pt")
    run_without_package(
        "import torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        "model = AutoModelForCausalLM.from_pretrained('plain')\n"
        "AutoTokenizer.from_pretrained('plain')\n"
        "assert type(model).__name__ == 'LlamaForCausalLM'\n"
        "with torch.no_grad(): logits = model(torch.arange(3, 200).unsqueeze(0)).logits\n"
        "assert torch.equal(logits, torch.load('expected.pt'))\n",
        tmp_path,
    )
    assert "trust_remote_code" not in (tmp_path / "plain" / "README.md").read_text()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ties_biases_ropes_and_dtypes_survive_there_and_back(tmp_path, dtype):
    save_source(tmp_path / "source", dtype=dtype, tie_word_embeddings=True, attention_bias=True)
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0}
    edit_json(tmp_path / "source" / "config.json", rope_parameters=rope)
    graft(tmp_path / "source", tmp_path / "bhyt")
    export(tmp_path / "bhyt", tmp_path / "plain", "--force")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "plain"))
    assert set(before) == set(after) and "lm_head.weight" not in after
    for name in before:
        assert after[name].dtype == dtype
        assert torch.equal(before[name], after[name]) or "layernorm" in name, name
    config = json.loads((tmp_path / "plain" / "config.json").read_text())
    assert config["rope_parameters"] == rope and config["tie_word_embeddings"] and config["attention_bias"]


def test_what_is_no_bhyt_folder_is_refused(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "llama")
    for name in ("llama", "absent"):
        with pytest.raises(ValueError, match="is no folder of a BHyT checkpoint"):
            export(tmp_path / name, tmp_path / "plain")
