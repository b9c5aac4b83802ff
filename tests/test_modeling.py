"""The whole model: a Llama where it is one, the oracle's twin everywhere, and what loaders and trainers see of it."""

import copy

import oracle
import pytest
import torch
from conftest import NORM_TYPES, TINY, tiny_llama, tiny_model
from torch import nn
from transformers import Trainer

from modeling_bhyt import (
    BHyTLlamaConfig,
    BHyTLlamaForCausalLM,
    BHyTLlamaForSequenceClassification,
    BHyTLlamaModel,
)


def logits_of(model, ids, **inputs):
    with torch.no_grad():
        return model(ids, **inputs).logits


def norm_parameters(model):
    return {name: parameter for name, parameter in model.named_parameters() if "norm" in name}


# Law 1: a Llama where the norm is Llama's, and the oracle's twin everywhere


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}])
def test_rmsnorm_is_bit_equal_to_llama_in_logits_loss_and_gradients(overrides, dtype, attention, token_ids):
    llama = tiny_llama(**overrides).to(dtype)
    ours = BHyTLlamaForCausalLM(BHyTLlamaConfig(**TINY, norm_type="rmsnorm", **overrides)).to(dtype)
    ours.load_state_dict(llama.state_dict())
    results = []
    for model in (llama, ours.train(llama.training)):
        model.set_attn_implementation(attention)
        output = model(token_ids, labels=token_ids)
        output.loss.backward()
        results.append((output.logits, output.loss, dict(model.named_parameters())))
    (logits, loss, parameters), (our_logits, our_loss, our_parameters) = results
    assert torch.equal(our_logits, logits) and torch.equal(our_loss, loss)
    assert our_parameters.keys() == parameters.keys()
    assert [name for name in parameters if not torch.equal(our_parameters[name].grad, parameters[name].grad)] == []


WHOLE_MODELS = [{"norm_type": norm_type} for norm_type in NORM_TYPES]
WHOLE_MODELS += [{"norm_type": "bhyt", "variance_estimator": name} for name in ("published", "fitted", "exact")]
WHOLE_MODELS += [{"norm_type": "rmsnorm", "variance_estimator": name} for name in ("uniform_attention", "fitted")]
WHOLE_MODELS += [{"norm_type": "bhyt", "exact_variance_layers": layers} for layers in ([0], [1, 2], [0, 1, 2])]
WHOLE_MODELS += [{"norm_type": "rmsnorm", "variance_estimator": "fitted", "exact_variance_layers": [1]}]
WHOLE_MODELS += [{"norm_type": name, "final_lambda": 3.0, "kappa": 6.0} for name in ("bhyt", "bhyt_star")]
WHOLE_MODELS += [{"norm_type": name, "learnable_lambda": False, "kappa": 4.0} for name in ("bhyt", "bhyt_star")]
WHOLE_MODELS += [{"norm_type": "bhyt", "learnable_variance": True, "attention_bias": True, "rms_norm_eps": 0.01}]
WHOLE_MODELS += [{"norm_type": "bhyt", "attention_lambda": [2.0, 1.0, 0.5], "mlp_lambda": [0.1, 3.0, 1.0]}]


@pytest.mark.parametrize("overrides", WHOLE_MODELS, ids=lambda o: "-".join(map(str, o.values())))
def test_whole_model_equals_oracle(overrides, token_ids):
    model = tiny_model(**overrides)
    logits, states = oracle.whole_model(model, token_ids)
    torch.testing.assert_close(logits_of(model, token_ids).double(), logits, rtol=1e-3, atol=1e-5)
    double = copy.deepcopy(model).double()
    with torch.no_grad():
        output = double(token_ids, output_hidden_states=True)
    for ours, theirs in zip(output.hidden_states[:-1], states[:-1]):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    # transformers' own RMSNorm at the end rounds to fp32
    torch.testing.assert_close(output.logits, logits, rtol=1e-5, atol=1e-6)


def test_embeddings_may_be_given_instead_of_ids(norm_type, token_ids):
    model = tiny_model(norm_type)
    logits = logits_of(model, None, inputs_embeds=model.get_input_embeddings()(token_ids))
    assert torch.equal(logits, logits_of(model, token_ids))


def test_layers_estimate_unless_they_are_named_exact():
    model = tiny_model(exact_variance_layers=[1])
    constants = [name for name in model.state_dict() if "variance" in name]
    where = [f"model.layers.{layer}.post_attention_layernorm.variance_" for layer in (0, 2)]
    assert sorted(constants) == sorted(prefix + name for prefix in where for name in ("offset", "ratio"))


def test_parameters_start_at_the_values_of_the_configuration(norm_type):
    bounded = norm_type in ("bhyt", "bhyt_star")
    lists = {"attention_lambda": [2.0, 1.0, 0.5], "mlp_lambda": [0.1, 3.0, 1.0], "dyt_alpha": [0.8, 0.3, 0.2]}
    config = BHyTLlamaConfig(**TINY, norm_type=norm_type, **lists, final_lambda=4.0 if bounded else None)
    model = BHyTLlamaForCausalLM(config)
    expected = {"model.embed_norm.scale": 8.0}
    expected |= {"model.norm.lam": 4.0, "model.norm.alpha": 0.2, "model.norm.bias": 0.0}
    for layer in range(3):
        sites = {"input_layernorm": ("attention_lambda", 0), "post_attention_layernorm": ("mlp_lambda", 1)}
        for site, (lambdas, alpha) in sites.items():
            prefix = f"model.layers.{layer}.{site}."
            expected |= {prefix + "lam": lists[lambdas][layer], prefix + "alpha": lists["dyt_alpha"][alpha]}
            expected |= {prefix + "variance_ratio": 1.0, prefix + "bias": 0.0}
    for name, parameter in norm_parameters(model).items():
        if not name.endswith("variance_offset"):
            assert (parameter == expected.get(name, 1.0)).all(), name
    names = {name.rsplit(".", 1)[1] for name in norm_parameters(model)}
    own = {"bhyt": {"lam", "variance_ratio", "variance_offset"}, "bhyt_star": {"lam"}}
    assert names == {"weight"} | own.get(norm_type, {"alpha", "bias", "scale"} if norm_type == "dyt" else set())


# The estimator's constants


def offsets_of(model):
    layers = model.base_model.layers
    return {n: layers[n].post_attention_layernorm.variance_offset.item() for n in model.config.estimated_layers}


@pytest.mark.parametrize("model_class", [BHyTLlamaModel, BHyTLlamaForCausalLM, BHyTLlamaForSequenceClassification])
@pytest.mark.parametrize("norm_type", ["bhyt", "rmsnorm"])
@pytest.mark.parametrize("estimator", ["uniform_attention", "published"])
def test_constants_of_a_new_model_come_from_its_weights(estimator, norm_type, model_class):
    extra = {"attention_lambda": [2.0, 1.0, 0.5], "variance_context_length": 64, "exact_variance_layers": [1]}
    model = model_class(BHyTLlamaConfig(**TINY, norm_type=norm_type, variance_estimator=estimator, **extra))
    expected = {layer: oracle.model_constant(model, layer) for layer in (0, 2)}
    assert min(expected.values()) > 0 and offsets_of(model) == pytest.approx(expected, rel=1e-6)


def test_published_and_uniform_attention_start_alike_and_part_with_gamma():
    models = []
    for estimator in ("published", "uniform_attention"):
        torch.manual_seed(0)
        models.append(BHyTLlamaForCausalLM(BHyTLlamaConfig(**TINY, variance_estimator=estimator)))
    published, uniform = models
    assert offsets_of(published) == pytest.approx(offsets_of(uniform), rel=1e-6)
    before = offsets_of(published)
    for model in models:
        for layer in model.model.layers:
            nn.init.constant_(layer.input_layernorm.weight, 3.0)
        model.refresh_variance_constants()
    assert offsets_of(published) == before
    assert offsets_of(uniform) == pytest.approx({n: 9 * c for n, c in before.items()}, rel=1e-6)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("num_key_value_heads", [4, 2, 1])
@pytest.mark.parametrize("overrides", [{}, {"variance_estimator": "published"}, {"exact_variance_layers": [0]}])
def test_refresh_changes_the_constants_alone_and_tells_old_and_new(overrides, num_key_value_heads, biased):
    model = tiny_model(num_key_value_heads=num_key_value_heads, attention_bias=biased, **overrides)
    before, old = copy.deepcopy(model.state_dict()), offsets_of(model)
    changes = model.refresh_variance_constants()
    new = {layer: oracle.model_constant(model, layer) for layer in model.config.estimated_layers}
    assert {layer: change[0] for layer, change in changes.items()} == old
    assert {layer: change[1] for layer, change in changes.items()} == pytest.approx(new, rel=1e-10)
    assert offsets_of(model) == pytest.approx(new, rel=1e-6)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) != name.endswith("variance_offset"), name


def test_refresh_of_fitted_constants_is_refused():
    model = tiny_model(variance_estimator="fitted")
    before = offsets_of(model)
    with pytest.raises(ValueError, match="fitted.*calibration"):
        model.refresh_variance_constants()
    assert offsets_of(model) == before


@pytest.mark.parametrize("estimator", ["uniform_attention", "published", "fitted"])
def test_constants_are_not_recomputed_on_load(estimator, tmp_path, token_ids):
    model = tiny_model(variance_estimator=estimator)
    for layer in model.model.layers:
        nn.init.constant_(layer.post_attention_layernorm.variance_offset, 0.3125)
    model.save_pretrained(tmp_path)
    loaded = BHyTLlamaForCausalLM.from_pretrained(tmp_path)
    assert offsets_of(loaded) == dict.fromkeys(range(3), 0.3125)
    logits_of(loaded, token_ids)
    assert offsets_of(loaded) == dict.fromkeys(range(3), 0.3125)
    assert torch.equal(logits_of(loaded, token_ids), logits_of(model, token_ids))


class SealedLinear(nn.Module):
    """A Linear whose weight nobody outside may read, as quantised layers and adapters are."""

    def __init__(self, linear):
        super().__init__()
        self.inner = linear

    def forward(self, x):
        return self.inner(x)

    @property
    def weight(self):
        raise AssertionError("the weight was read")


def test_forward_never_reads_the_weights_of_a_projection(norm_type, token_ids):
    model = tiny_model(norm_type)
    expected = logits_of(model, token_ids)
    for layer in model.model.layers:
        for name in ("v_proj", "o_proj"):
            setattr(layer.self_attn, name, SealedLinear(getattr(layer.self_attn, name)))
    assert torch.equal(logits_of(model, token_ids), expected)


# Half precision


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_huge_embeddings_stay_finite(norm_type, dtype, token_ids):
    model = tiny_model(norm_type)
    model.model.embed_tokens.weight.data.mul_(3000)
    output = model.to(dtype)(token_ids, output_hidden_states=True)
    assert output.hidden_states[0].abs().max() > 256
    assert output.logits.isfinite().all() and all(state.isfinite().all() for state in output.hidden_states)
    output.logits.float().pow(2).mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_every_decoder_layer_has_one_dtype_after_loading(norm_type, tmp_path):
    tiny_model(norm_type).save_pretrained(tmp_path)
    for layer in BHyTLlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).model.layers:
        assert {tensor.dtype for tensor in layer.state_dict().values()} == {torch.bfloat16}


# What trainers see


@pytest.mark.parametrize("overrides", WHOLE_MODELS, ids=lambda o: "-".join(map(str, o.values())))
def test_weight_decay_spares_every_norm_parameter(overrides):
    model = tiny_model(**overrides)
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    matrices = {name for name, parameter in model.named_parameters() if parameter.ndim == 2}
    assert decayed == matrices and not decayed & norm_parameters(model).keys()


@pytest.mark.parametrize("overrides", WHOLE_MODELS, ids=lambda o: "-".join(map(str, o.values())))
def test_no_parameter_is_a_scalar(overrides):
    assert all(parameter.ndim >= 1 for parameter in tiny_model(**overrides).parameters())
