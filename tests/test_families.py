"""Families whose block is Llama's own come in exactly; all others are refused with the reason."""

import json

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from conftest import TINY, shake
from safetensors.torch import load_file, save_file
from test_graft import edit_json, graft, logits
from test_source import refusal
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from conversion.rotation import model_of, rotate
from conversion.source import read_source


ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 30000.0}


def save_family(folder, model_class, config_class, dtype=torch.float32, **overrides):
    torch.manual_seed(0)
    model = shake(model_class(config_class(**{**TINY, "rope_parameters": ROPE, **overrides}))).eval().to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.uniform_(-0.5, 0.5)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return model


FAMILIES = {
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None, "head_dim": 24}),
    "mistral with a window as long as its context": (MistralForCausalLM, MistralConfig, {"sliding_window": 256}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2, tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("basis", ["original", "rotated"])
def test_an_identity_graft_of_another_family_has_its_logits(tmp_path, family, basis):
    model_class, config_class, overrides = FAMILIES[family]
    model = save_family(tmp_path / "source", model_class, config_class, **overrides)
    flags = ["--basis", basis, "--attention_lambda", "0.001", "--mlp_lambda", "0.001", "--variance_estimator", "exact"]
    grafted = graft(tmp_path / "source", tmp_path / "out", *flags)
    assert (logits(grafted) - logits(model)).abs().max() < 1e-4 * logits(model).abs().max()
    assert grafted.config.model_type == "bhyt_llama"


@pytest.mark.parametrize("family", FAMILIES)
def test_another_family_is_exactly_expressed_as_a_llama(tmp_path, family):
    model_class, config_class, overrides = FAMILIES[family]
    model = save_family(tmp_path, model_class, config_class, **overrides)
    source = read_source(str(tmp_path))
    assert type(source.model) is model_class
    rotated = model_of(rotate(source, 0))
    assert (logits(rotated) - logits(model)).abs().max() < 1e-5 * logits(model).abs().max()


def test_qwen2_gets_an_output_bias_of_zero_and_keeps_its_others(tmp_path):
    save_family(tmp_path / "source", Qwen2ForCausalLM, Qwen2Config, dtype=torch.bfloat16)
    graft(tmp_path / "source", tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "out"))
    for layer in range(3):
        prefix = f"model.layers.{layer}.self_attn"
        assert torch.equal(after[f"{prefix}.o_proj.bias"], torch.zeros(64, dtype=torch.bfloat16))
        assert torch.equal(after[f"{prefix}.q_proj.bias"], before[f"{prefix}.q_proj.bias"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["attention_bias"] is True


def test_a_sliding_window_is_refused(tmp_path):
    save_family(tmp_path, MistralForCausalLM, MistralConfig, sliding_window=64)
    assert "a sliding window of 64 of 256 positions" in refusal(tmp_path)
    save_family(tmp_path, Qwen2ForCausalLM, Qwen2Config, use_sliding_window=True, sliding_window=32)
    assert "a sliding window of 32 of 256 positions" in refusal(tmp_path)


@pytest.mark.parametrize(
    "model_type,reason",
    [
        ("qwen3", "it normalises queries and keys"),
        ("olmo2", "it normalises queries and keys"),
        ("gpt_neox", "it uses LayerNorm"),
        ("stablelm", "it uses LayerNorm"),
        ("gemma", "its norms multiply by 1 + weight"),
        ("mixtral", "mixture of experts"),
        ("phi3", "its projections are fused"),
        ("something_new", "its block is not known to be Llama's"),
        (None, "its block is not known to be Llama's"),
    ],
)
def test_other_architectures_are_refused_with_the_reason(tmp_path, model_type, reason):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, "hidden_size": 8}))
    assert reason in refusal(tmp_path) and "llama, mistral and qwen2" in refusal(tmp_path)


def test_query_norms_under_a_llamas_name_are_refused(tmp_path):
    save_family(tmp_path, Qwen2ForCausalLM, Qwen2Config)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "1 unexpected tensors" in refusal(tmp_path) and "q_norm" in refusal(tmp_path)


def test_a_llama_without_a_tied_head_field_of_another_family_is_settled_by_its_file(tmp_path):
    model = save_family(tmp_path, Qwen2ForCausalLM, Qwen2Config, tie_word_embeddings=False)
    edit_json(tmp_path / "config.json", tie_word_embeddings="absent")
    source = read_source(str(tmp_path))
    assert not source.config.tie_word_embeddings
    assert torch.equal(source.tensors["lm_head.weight"], model.lm_head.weight)
