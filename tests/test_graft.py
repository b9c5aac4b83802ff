"""The graft in closed form: what it fits, what it leaves alone."""

import json

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from conftest import REPOSITORY, TINY, run_without_package, tiny_llama
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from conversion.arguments import GraftArguments, parse
from conversion.calibration import OriginalBasis
from conversion.choice import candidates
from conversion.graft import Sites, fit_sites
from conversion.source import read_source
from modeling_bhyt import BHyTLlamaForCausalLM
from modeling_bhyt.normalization_bhyt import attention_variance, fit_ratio_and_offset, fit_sums


QUICK = ["--window_length", "48", "--num_calibration_tokens", "384", "--num_report_tokens", "192"]
QUICK += ["--calibration_text", str(REPOSITORY / "LICENSE")]
# Everything by hand, near the source: what a graft without choices does
BY_HAND = [
    "--basis",
    "original",
    "--attention_lambda",
    "0.25",
    "--mlp_lambda",
    "0.25",
    "--exact_variance_layers",
    "none",
]
QUICK += BY_HAND


def save_source(folder, tokenizer=None, dtype=torch.float32, **overrides) -> LlamaForCausalLM:
    model = tiny_llama(**overrides).to(dtype)
    model.save_pretrained(folder)
    (tokenizer or byte_tokenizer()).save_pretrained(folder)
    return model


def edit_json(file, **values):
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({name: value for name, value in content.items() if value != "absent"}))


def graft(source, output, *flags):
    from conversion.__main__ import graft as run

    run(parse(GraftArguments, [str(source), str(output), *QUICK, *flags]))
    return BHyTLlamaForCausalLM.from_pretrained(output)


def fitted_sites(folder, windows, *flags):
    """The parameters of every site of a graft whose choices are all made by hand."""
    arguments = parse(GraftArguments, [str(folder), "unused", *BY_HAND, *flags])
    source = read_source(arguments.source)
    sites = Sites(source, source, arguments, candidates(arguments, source.config.num_hidden_layers))
    fit_sites(sites, {"original": OriginalBasis()}, windows)
    return source, {key: site for key, options in sites.items() for site in options.values()}


def logits(model, ids=None):
    ids = torch.arange(3, 200).unsqueeze(0) if ids is None else ids
    with torch.no_grad():
        return model.eval()(ids).logits


def test_graft_tends_to_the_source_as_lambda_tends_to_zero(tmp_path):
    source = save_source(tmp_path / "source")
    errors = []
    for number, lam in enumerate(("0.5", "0.1", "0.02")):
        flags = ["--attention_lambda", lam, "--mlp_lambda", lam, "--variance_estimator", "exact"]
        model = graft(tmp_path / "source", tmp_path / str(number), *flags)
        errors.append((logits(model) - logits(source)).abs().max().item())
    assert errors[0] > errors[1] > errors[2] and errors[2] < 1e-3 * logits(source).abs().max()


def test_gain_is_the_least_squares_solution_on_the_sources_own_states(tmp_path):
    """Recomputed from the states that the source's hidden_states show: sum(t y) / sum(t^2), with t in fp64."""
    save_source(tmp_path / "source")
    windows = torch.randint(3, 250, (4, 24), generator=torch.Generator().manual_seed(0))
    source, sites = fitted_sites(tmp_path / "source", windows, "--variance_estimator", "exact")
    config = source.config
    with torch.no_grad():
        states = source.model(windows, output_hidden_states=True).hidden_states
    for layer in range(config.num_hidden_layers):
        x = states[layer].double()
        s = (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
        t = torch.tanh(0.25 / (10 * s) * x)
        y = source.model.model.layers[layer].input_layernorm.weight.double() * x / s
        expected = (t * y).sum((0, 1)) / (t * t).sum((0, 1))
        torch.testing.assert_close(sites[layer, "attention"].gain, expected, rtol=1e-4, atol=1e-5)


def test_a_silent_channel_keeps_the_limit_gain(tmp_path):
    model = save_source(tmp_path / "source")
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 7] = 0
    model.save_pretrained(tmp_path / "source")
    grafted = graft(tmp_path / "source", tmp_path / "out")
    gain = model.model.layers[0].input_layernorm.weight[7]
    torch.testing.assert_close(grafted.model.layers[0].input_layernorm.weight[7], gain * 10 / 0.25)


@pytest.mark.parametrize("r,c", [(1.3, 0.4), (0.9, 0.0), (0.0, 2.0)])
def test_ratio_and_offset_are_recovered_where_the_relation_is_exact(r, c):
    m = torch.rand(500, dtype=torch.float64) + 0.1
    ratio, offset = fit_ratio_and_offset(fit_sums(m, r * m + c))
    assert ratio == pytest.approx(r, abs=1e-9) and offset == pytest.approx(c, abs=1e-9)


def test_ratio_and_offset_are_never_negative_and_no_neighbour_is_better():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        m = torch.rand(60, dtype=torch.float64, generator=generator) + 0.05
        second = m * torch.rand(60, dtype=torch.float64, generator=generator) + 0.1 - 0.05 * m
        r, c = fit_ratio_and_offset(fit_sums(m, second))
        cost = lambda r, c, m=m, second=second: ((r * m + c) / second - 1).pow(2).sum()  # noqa: E731
        assert r >= 0 and c >= 0
        for dr, dc in ((1e-3, 0), (-1e-3, 0), (0, 1e-3), (0, -1e-3)):
            if r + dr >= 0 and c + dc >= 0:
                assert cost(r, c) <= cost(r + dr, c + dc) + 1e-9


@pytest.mark.parametrize("estimator", ["uniform_attention", "published"])
def test_constants_from_weights_use_the_grafted_gain_and_the_biases(tmp_path, estimator):
    save_source(tmp_path / "source", attention_bias=True)
    model = graft(tmp_path / "source", tmp_path / "out", "--variance_estimator", estimator)
    layer = model.model.layers[1]
    refined = {}
    if estimator == "uniform_attention":
        biases = {"value_bias": layer.self_attn.v_proj.bias, "output_bias": layer.self_attn.o_proj.bias}
        refined = {"gamma": layer.input_layernorm.weight, **biases}
    with torch.no_grad():
        weights = layer.self_attn.v_proj.weight, layer.self_attn.o_proj.weight
        expected = attention_variance(*weights, 16, 0.025, 1024, **refined)
    assert layer.post_attention_layernorm.variance_offset.item() == pytest.approx(expected, rel=1e-6)
    assert layer.post_attention_layernorm.variance_ratio.item() == 1
    # Constants of the checkpoint agree with what a refresh computes from the same weights
    assert all(new == pytest.approx(old, rel=1e-6) for old, new in model.refresh_variance_constants().values())


def test_exact_layers_hold_no_estimator_and_lambda_may_differ_a_layer(tmp_path):
    save_source(tmp_path / "source")
    flags = ["--exact_variance_layers", "0,2", "--mlp_lambda", "0.1", "0.2", "0.3"]
    model = graft(tmp_path / "source", tmp_path / "out", *flags)
    norms = [layer.post_attention_layernorm for layer in model.model.layers]
    assert [hasattr(norm, "variance_ratio") for norm in norms] == [False, True, False]
    assert [round(norm.lam.item(), 6) for norm in norms] == [0.1, 0.2, 0.3]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_that_no_norm_replaces_stays_bit_identical(tmp_path, tied, dtype):
    save_source(tmp_path / "source", dtype=dtype, tie_word_embeddings=tied)
    graft(tmp_path / "source", tmp_path / "out")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "out"))
    norms = {name for name in before if name.endswith(("input_layernorm.weight", "post_attention_layernorm.weight"))}
    assert len(norms) == 2 * TINY["num_hidden_layers"] and norms <= set(after)
    for name in set(before) - norms:
        assert after[name].dtype == dtype and torch.equal(after[name], before[name]), name
    added = set(after) - set(before)
    assert all(name.endswith((".lam", ".variance_ratio", ".variance_offset")) for name in added)
    assert {tensor.dtype for tensor in after.values()} == {dtype}
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == dtype
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert size < 1.02 * (tmp_path / "source" / "model.safetensors").stat().st_size + 200 * len(added)
    model = BHyTLlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied


def test_mixed_dtypes_survive_tensor_by_tensor(tmp_path):
    save_source(tmp_path / "source", dtype=torch.bfloat16)
    file = tmp_path / "source" / "model.safetensors"
    mixed = {name: t.float() if "norm" in name else t for name, t in load_file(file).items()}
    save_file(mixed, file, metadata={"format": "pt"})
    graft(tmp_path / "source", tmp_path / "out")
    after = load_file(tmp_path / "out" / "model.safetensors")
    expected = {name: torch.float32 if "norm" in name else torch.bfloat16 for name in after}
    assert {name: tensor.dtype for name, tensor in after.items()} == expected
    # Fitted under the constants that the model runs with, in the dtype of its embeddings
    constants = [tensor for name, tensor in after.items() if name.endswith((".lam", "_ratio", "_offset"))]
    assert constants and all(torch.equal(tensor, tensor.bfloat16().float()) for tensor in constants)


def test_dtype_flag_casts_everything(tmp_path):
    save_source(tmp_path / "source")
    graft(tmp_path / "source", tmp_path / "out", "--dtype", "bfloat16")
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_gain_is_fitted_under_the_rounded_constants(tmp_path):
    """lambda, r and c as bf16 stores them: 0.3 becomes 0.30078125, and the gains answer to that."""
    save_source(tmp_path / "source", dtype=torch.bfloat16)
    windows = torch.randint(3, 250, (2, 24))
    _, sites = fitted_sites(tmp_path / "source", windows, "--attention_lambda", "0.3")
    for site in sites.values():
        for value in filter(None, (site.lam, site.ratio, site.offset)):
            assert value == torch.tensor(value).bfloat16().item()
    assert sites[0, "attention"].lam == 0.30078125


def test_constants_that_a_dtype_cannot_hold_are_refused(tmp_path):
    save_source(tmp_path / "source")
    for lam, reason in (("1e-6", "does not fit float16"), ("1e-9", "lambda becomes 0")):
        with pytest.raises(ValueError, match=reason):
            graft(tmp_path / "source", tmp_path / "out", "--attention_lambda", lam, "--dtype", "float16")
        assert not (tmp_path / "out").exists()


ROPES = [
    {"rope_theta": 500000.0},
    {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    {
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
]


@pytest.mark.parametrize("old_style", [True, False], ids=["old", "new"])
@pytest.mark.parametrize("rope", ROPES, ids=["theta", "linear", "llama3", "yarn"])
def test_rope_settings_survive_in_both_spellings(tmp_path, rope, old_style):
    save_source(tmp_path / "source")
    new = {"rope_theta": rope["rope_theta"], **rope.get("rope_scaling", {})}
    new["rope_type"] = new.pop("type", None) or new.get("rope_type", "default")
    spelling = {**rope, "rope_parameters": "absent"} if old_style else {"rope_parameters": new}
    edit_json(tmp_path / "source" / "config.json", **spelling)
    source = LlamaForCausalLM.from_pretrained(tmp_path / "source")
    flags = ["--attention_lambda", "0.01", "--mlp_lambda", "0.01", "--variance_estimator", "exact"]
    model = graft(tmp_path / "source", tmp_path / "out", *flags)
    assert torch.equal(model.model.rotary_emb.inv_freq, source.model.rotary_emb.inv_freq)
    assert model.model.rotary_emb.attention_scaling == source.model.rotary_emb.attention_scaling
    difference = (logits(model) - logits(source))[:, 150:].abs().max()
    assert difference < 1e-3 * logits(source).abs().max()


def test_context_length_bounds_the_tokenizer_and_the_template_survives(tmp_path):
    save_source(tmp_path / "source")
    edit_json(tmp_path / "source" / "tokenizer_config.json", model_max_length="absent")
    graft(tmp_path / "source", tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.model_max_length == TINY["max_position_embeddings"]
    assert len(tokenizer("word " * 1000, truncation=True).input_ids) <= TINY["max_position_embeddings"]
    assert tokenizer.chat_template == byte_tokenizer().chat_template

    shorter = byte_tokenizer()
    shorter.model_max_length = 100
    save_source(tmp_path / "source2", tokenizer=shorter)
    graft(tmp_path / "source2", tmp_path / "out2")
    assert AutoTokenizer.from_pretrained(tmp_path / "out2").model_max_length == 100


def test_unknown_fields_and_generation_settings_survive_and_nothing_calls_it_a_llama(tmp_path):
    save_source(tmp_path / "source")
    edit_json(tmp_path / "source" / "config.json", my_own_note="kept")
    edit_json(tmp_path / "source" / "generation_config.json", do_sample=True, temperature=0.6, eos_token_id=[2, 5])
    model = graft(tmp_path / "source", tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored["my_own_note"] == "kept" and stored["model_type"] == "bhyt_llama"
    assert stored["architectures"] == ["BHyTLlamaForCausalLM"] and model.config.model_type == "bhyt_llama"
    assert model.generation_config.temperature == 0.6 and model.generation_config.eos_token_id == [2, 5]


def test_result_loads_in_a_process_without_the_package(tmp_path):
    save_source(tmp_path / "source")
    model = graft(tmp_path / "source", tmp_path / "out")
    torch.save(logits(model), tmp_path / "expected.pt")
    run_without_package(
        "import torch\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer, AutoModel\n"
        "model = AutoModelForCausalLM.from_pretrained('out', trust_remote_code=True).eval()\n"
        "AutoModel.from_pretrained('out', trust_remote_code=True)\n"
        "AutoTokenizer.from_pretrained('out', trust_remote_code=True)\n"
        "with torch.no_grad(): logits = model(torch.arange(3, 200).unsqueeze(0)).logits\n"
        "assert torch.equal(logits, torch.load('expected.pt'))\n",
        tmp_path,
    )


def test_grafted_tensors_account_for_every_source_tensor(tmp_path):
    save_source(tmp_path / "source", tie_word_embeddings=True)
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, file, metadata={"format": "pt"})
    graft(tmp_path / "source", tmp_path / "out")
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())["tensors"]
    assert len(report["left_out"]) == 2 and report["replaced"] == 6
    assert report["kept"] + report["replaced"] + len(report["left_out"]) == len(tensors)
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
