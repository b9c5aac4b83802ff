"""The rotated basis: an orthogonal Q for every width, and the same function before any norm is replaced."""

import json

import pytest
import torch
from safetensors.torch import load_file
from test_graft import QUICK, edit_json, graft, logits, save_source
from transformers import LlamaForCausalLM

from conversion.rotation import Rotation, check_rotation, hadamard, hartley, model_of, rotate
from conversion.source import read_source


ROTATED = [*QUICK, "--basis", "rotated", "--attention_lambda", "1", "--mlp_lambda", "1"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 24, 60, 64, 96, 576, 2048])
def test_rotation_is_orthogonal_for_every_width(size):
    rotation = Rotation(size, seed=3)
    matrix = rotation(torch.eye(size))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-12, rtol=0)
    x = torch.randn(5, size, dtype=torch.float64)
    torch.testing.assert_close(rotation(x), x @ matrix, atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(rotation(x.T, dim=0), matrix.T @ x.T, atol=1e-12, rtol=1e-10)


def test_factors_are_orthogonal_and_every_entry_of_hadamard_counts_the_same():
    for factor in (hadamard(6), hartley(9), hartley(61)):
        torch.testing.assert_close(factor @ factor.T, torch.eye(len(factor), dtype=torch.float64), atol=1e-12, rtol=0)
    assert hadamard(6).abs().allclose(torch.tensor(0.125, dtype=torch.float64))


def test_the_seed_chooses_the_signs():
    x = torch.randn(4, 64)
    assert torch.equal(Rotation(64, 1)(x), Rotation(64, 1)(x))
    assert not torch.allclose(Rotation(64, 1)(x), Rotation(64, 2)(x))


def test_an_outlier_channel_is_spread_over_all():
    x = torch.randn(100, 576)
    x[:, 7] = 300
    largest = lambda x: (x.abs().amax(-1) / x.pow(2).mean(-1).sqrt()).max()  # noqa: E731
    assert largest(x) > 20 and largest(Rotation(576, 0)(x)) < 2


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("biased", [True, False], ids=["biased", "unbiased"])
@pytest.mark.parametrize("hidden_size", [64, 60])
def test_rotation_alone_preserves_the_logits(tmp_path, tied, biased, hidden_size):
    """Gains and biases are random (conftest.shake), key-value heads are shared, and 60 = 15 x 4 is no power of two."""
    biases = {"attention_bias": biased, "mlp_bias": biased}
    model = save_source(tmp_path, tie_word_embeddings=tied, hidden_size=hidden_size, head_dim=16, **biases)
    base = rotate(read_source(str(tmp_path)), seed=0)
    rotated = model_of(base)
    assert (logits(rotated) - logits(model)).abs().max() < 2e-6 * logits(model).abs().max() + 1e-5
    gains = [tensor for name, tensor in base.tensors.items() if name.endswith("norm.weight")]
    assert gains and all(torch.equal(gain, torch.ones_like(gain)) for gain in gains)
    assert not torch.equal(base.tensors["lm_head.weight"], base.tensors["model.embed_tokens.weight"])


def test_rotation_reports_what_rounding_and_untying_cost(tmp_path):
    window = torch.arange(3, 60)
    for dtype, most in ((torch.float32, 1e-6), (torch.bfloat16, 1e-2)):
        save_source(tmp_path / str(dtype), dtype=dtype, tie_word_embeddings=True)
        source = read_source(str(tmp_path / str(dtype)))
        check = check_rotation(source, rotate(source, 0), window, 0)
        assert abs(check.kl_nats_per_token) < most and check.untied_bytes == 300 * 64 * dtype.itemsize
    assert check.kl_nats_per_token > 1e-8


def test_a_rotation_that_changes_the_function_is_refused(tmp_path):
    save_source(tmp_path)
    source = read_source(str(tmp_path))
    other = rotate(source, 0)
    broken = {name: tensor * (2 if name.endswith("v_proj.weight") else 1) for name, tensor in other.tensors.items()}
    other.tensors = broken
    with pytest.raises(ValueError, match="the rotated model differs from the source"):
        check_rotation(source, other, torch.arange(3, 60), 0)


def test_rotated_graft_tends_to_the_source_as_lambda_tends_to_zero(tmp_path):
    source = save_source(tmp_path / "source")
    errors = []
    for number, lam in enumerate(("1", "0.2", "0.04")):
        flags = [*ROTATED, "--attention_lambda", lam, "--mlp_lambda", lam, "--variance_estimator", "exact"]
        model = graft(tmp_path / "source", tmp_path / str(number), *flags)
        errors.append((logits(model) - logits(source)).abs().max().item())
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-3 * logits(source).abs().max()


@pytest.mark.parametrize("tied", [True, False])
def test_rotated_graft_is_untied_and_says_what_that_costs(tmp_path, tied):
    save_source(tmp_path / "source", tie_word_embeddings=tied)
    model = graft(tmp_path / "source", tmp_path / "out", *ROTATED)
    assert model.lm_head.weight is not model.model.embed_tokens.weight and not model.config.tie_word_embeddings
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert report["rotation"]["untied_bytes"] == (300 * 64 * 4 if tied else 0)
    assert ("untied head" in (tmp_path / "out" / "conversion_report.md").read_text()) == tied


def test_uniform_attention_constant_is_the_same_in_both_bases(tmp_path):
    """||W_O W_V diag(gamma)||_F does not change under Q; the fitted gains differ only by the tanh."""
    save_source(tmp_path / "source", attention_bias=True)
    constants = []
    for basis in ("original", "rotated"):
        flags = ["--basis", basis, "--variance_estimator", "uniform_attention"]
        flags += ["--attention_lambda", "0.01", "--mlp_lambda", "0.01"]
        model = graft(tmp_path / "source", tmp_path / basis, *flags)
        constants.append([layer.post_attention_layernorm.variance_offset.item() for layer in model.model.layers])
    assert constants[0] == pytest.approx(constants[1], rel=1e-3)


def test_rope_scaling_and_biases_survive_the_default_graft(tmp_path):
    save_source(tmp_path / "source", attention_bias=True, mlp_bias=True)
    edit_json(
        tmp_path / "source" / "config.json",
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0},
    )
    source = LlamaForCausalLM.from_pretrained(tmp_path / "source")
    flags = [*ROTATED, "--attention_lambda", "0.02", "--mlp_lambda", "0.02", "--variance_estimator", "exact"]
    model = graft(tmp_path / "source", tmp_path / "out", *flags)
    assert torch.equal(model.model.rotary_emb.inv_freq, source.model.rotary_emb.inv_freq)
    assert (logits(model) - logits(source))[:, 150:].abs().max() < 1e-3 * logits(source).abs().max()


def test_untouched_tensors_keep_their_dtype_and_writers_rotate_back(tmp_path):
    model = save_source(tmp_path / "source", dtype=torch.bfloat16)
    graft(tmp_path / "source", tmp_path / "out", *ROTATED)
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    name = "model.layers.1.mlp.down_proj.weight"
    back = Rotation(64, 0)(torch.eye(64)) @ after[name].double()
    torch.testing.assert_close(back, model.state_dict()[name].double(), atol=2e-2, rtol=2e-2)


def test_another_llama_in_another_dtype_is_rounded_once(tmp_path):
    """A bf16 source saved in fp32 is rotated in fp64 and rounded to fp32, never to bf16."""
    save_source(tmp_path / "source", dtype=torch.bfloat16)
    source = read_source(str(tmp_path / "source"))
    base = rotate(source, 0, "float32")
    name = "model.layers.0.self_attn.q_proj.weight"
    expected = Rotation(64, 0)(
        source.tensors[name].double() * source.tensors["model.layers.0.input_layernorm.weight"].double()
    )
    torch.testing.assert_close(base.tensors[name].double(), expected, atol=1e-7, rtol=1e-6)
