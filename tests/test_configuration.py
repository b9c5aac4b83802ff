"""The configuration: what it accepts, refuses and keeps, and what it says about depth."""

import json
import logging
import math

import pytest
from conftest import TINY, tiny_model
from huggingface_hub.errors import StrictDataclassError, StrictDataclassFieldValidationError

from modeling_bhyt import BHyTLlamaConfig, BHyTLlamaForCausalLM, __version__, configuration_bhyt
from modeling_bhyt.configuration_bhyt import AUTO_MAP


REFUSED = (ValueError, StrictDataclassError)
NUMBERS = ["kappa", "attention_lambda", "mlp_lambda", "final_lambda"]
ALL_FIELDS = {
    "norm_type": "bhyt",
    "kappa": 12.5,
    "attention_lambda": [2.0, 1.5, 1.0],
    "mlp_lambda": [1.0, 0.1, 1 / 3],
    "final_lambda": 3.0,
    "learnable_lambda": False,
    "learnable_variance": True,
    "variance_estimator": "fitted",
    "variance_context_length": 512,
    "exact_variance_layers": [0, 2],
    "dyt_alpha": [0.8, 0.2, 0.1],
    "rms_norm_eps": 1e-5,
}
WITHOUT_FINAL = {name: value for name, value in ALL_FIELDS.items() if name != "final_lambda"}


def config_of(**overrides) -> BHyTLlamaConfig:
    return BHyTLlamaConfig(**{**TINY, **overrides})


def refusal(**overrides) -> str:
    with pytest.raises(REFUSED) as error:
        config_of(**overrides)
    return str(error.value)


@pytest.fixture
def warned():
    """What the configuration logs; transformers prints each warning once a process, so its memory is cleared first."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.Logger.warning_once.cache_clear()
    configuration_bhyt.logger.addHandler(handler)
    yield messages
    configuration_bhyt.logger.removeHandler(handler)


@pytest.mark.parametrize("name", [*NUMBERS, "rms_norm_eps"])
def test_whole_number_is_accepted_and_kept_as_float(name):
    config = config_of(**{name: 10})
    assert getattr(config, name) == 10 and type(getattr(config, name)) is float


@pytest.mark.parametrize("name", ["attention_lambda", "mlp_lambda", "dyt_alpha"])
def test_whole_numbers_in_lists_are_kept_as_floats(name):
    kept = getattr(config_of(**{name: [1, 2.5, 3]}), name)
    assert kept == [1.0, 2.5, 3.0] and all(type(number) is float for number in kept)


WRONG_TYPES = [(name, value) for name in [*NUMBERS, "rms_norm_eps"] for value in (True, "10", "None", {})]
WRONG_TYPES += [(name, None) for name in ("kappa", "attention_lambda", "mlp_lambda", "rms_norm_eps")]
WRONG_TYPES += [(name, [1.0, True, 1.0]) for name in ("attention_lambda", "mlp_lambda", "dyt_alpha")]
WRONG_TYPES += [(name, [1.0, "1", 1.0]) for name in ("attention_lambda", "mlp_lambda", "dyt_alpha")]
WRONG_TYPES += [("kappa", [10.0, 10.0, 10.0]), ("final_lambda", [1.0]), ("dyt_alpha", 0.5), ("dyt_alpha", "0.5")]
WRONG_TYPES += [("attention_lambda", (1.0, 1.0, 1.0))]
WRONG_TYPES += [(name, value) for name in ("learnable_lambda", "learnable_variance") for value in (1, "true", None)]
WRONG_TYPES += [("variance_context_length", value) for value in (True, 1024.0, "1024", None)]
WRONG_TYPES += [("exact_variance_layers", value) for value in (0, "0", [True], [0.0], ["0"], None)]
WRONG_TYPES += [("norm_type", value) for value in ("BHyT", "layernorm", None, 1, True)]
WRONG_TYPES += [("variance_estimator", value) for value in ("Exact", "none", "None", 1, True)]


@pytest.mark.parametrize("name, value", WRONG_TYPES)
def test_value_of_the_wrong_type_is_refused_by_name(name, value):
    with pytest.raises(StrictDataclassFieldValidationError, match=f"'{name}'"):
        config_of(**{name: value})


@pytest.mark.parametrize("value", [0, -1, -0.5, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [*NUMBERS, "attention_lambda list", "mlp_lambda list", "dyt_alpha list"])
def test_number_that_is_not_finite_and_positive_is_refused(name, value):
    message = refusal(**{name.removesuffix(" list"): [1.0, value, 1.0] if name.endswith("list") else value})
    assert f"{name.removesuffix(' list')} is {float(value)}: give a finite number above 0" in message


@pytest.mark.parametrize("value", [-1e-6, math.nan, math.inf])
def test_eps_that_is_negative_or_not_finite_is_refused(value):
    assert f"rms_norm_eps is {value}: give" in refusal(rms_norm_eps=value)


@pytest.mark.parametrize("value", [0, -5])
def test_context_length_below_one_token_is_refused(value):
    assert f"variance_context_length is {value}: give at least 1 token" in refusal(variance_context_length=value)


@pytest.mark.parametrize("name", ["attention_lambda", "mlp_lambda"])
@pytest.mark.parametrize("value", [[], [1.0], [1.0] * 4])
def test_lambda_list_needs_one_number_a_layer(name, value):
    message = refusal(**{name: value})
    assert f"{name} has {len(value)} numbers for num_hidden_layers = 3" in message and "one for each layer" in message


@pytest.mark.parametrize("value", [[], [0.5], [0.5] * 4])
def test_dyt_alpha_needs_three_numbers(value):
    assert f"dyt_alpha has {len(value)} numbers: give three" in refusal(norm_type="dyt", dyt_alpha=value)


@pytest.mark.parametrize("layer", [-1, 3, 99])
def test_exact_layer_outside_the_model_is_refused(layer):
    message = refusal(exact_variance_layers=[0, layer])
    assert f"names layer {layer}" in message and "from 0 to 2" in message


@pytest.mark.parametrize("estimator", ["uniform_attention", "published", "fitted"])
def test_only_bhyt_and_rmsnorm_estimate(estimator, norm_type):
    if norm_type in ("bhyt", "rmsnorm"):
        assert config_of(norm_type=norm_type, variance_estimator=estimator).estimated_layers == [0, 1, 2]
    else:
        message = refusal(norm_type=norm_type, variance_estimator=estimator)
        assert repr(estimator) in message and repr(norm_type) in message and "leave it null" in message


def test_every_norm_may_name_its_exact_statistics(norm_type):
    assert config_of(norm_type=norm_type, variance_estimator="exact").estimated_layers == []
    assert config_of(norm_type=norm_type).estimated_layers == ([0, 1, 2] if norm_type == "bhyt" else [])


def test_only_bounded_norms_have_a_final_lambda(norm_type):
    if norm_type in ("bhyt", "bhyt_star"):
        assert config_of(norm_type=norm_type, final_lambda=3).final_lambda == 3.0
    else:
        message = refusal(norm_type=norm_type, final_lambda=3)
        assert "final_lambda is 3.0" in message and repr(norm_type) in message and "leave it null" in message


@pytest.mark.parametrize(
    "key, meant",
    {
        "kapa": "kappa",
        "bhyt_kappa": "kappa",
        "bhyt_kapa": "kappa",
        "lambda_attention": "attention_lambda",
        "attention_lamda": "attention_lambda",
        "bhyt_attention_lambda": "attention_lambda",
        "lambda_mlp": "mlp_lambda",
        "final_lamda": "final_lambda",
        "learn_lambda": "learnable_lambda",
        "variance_learnable": "learnable_variance",
        "normtype": "norm_type",
        "norm_types": "norm_type",
        "variance_estimater": "variance_estimator",
        "context_length_variance": "variance_context_length",
        "exact_variance_layer": "exact_variance_layers",
        "dyt_alphas": "dyt_alpha",
        "bhyt_versions": "bhyt_version",
    }.items(),
)
def test_misspelt_field_is_refused_with_the_right_spelling(key, meant):
    message = refusal(**{key: 1})
    assert repr(key) in message and f"did you mean '{meant}'?" in message


def test_other_unknown_keys_survive_a_round_trip(tmp_path):
    extra = {
        "comment": "kept",
        "layer_types": ["full_attention"] * 3,
        "norm_eps": 1e-5,
        "attention_window": 7,
        "tokenizer_class": "LlamaTokenizer",
        "unsloth_version": "2026.1",
        "my_settings": {"nested": [1, None]},
    }
    config_of(**extra).save_pretrained(tmp_path)
    loaded = BHyTLlamaConfig.from_pretrained(tmp_path)
    assert {key: getattr(loaded, key) for key in extra} == extra


@pytest.mark.parametrize("fields", [{}, ALL_FIELDS, {**WITHOUT_FINAL, "norm_type": "rmsnorm"}, {"norm_type": "dyt"}])
def test_json_round_trip_is_exact(fields, tmp_path):
    config = config_of(**fields)
    assert {name: getattr(config, name) for name in fields} == fields
    assert BHyTLlamaConfig.from_dict(json.loads(json.dumps(config.to_dict()))).to_dict() == config.to_dict()
    config.save_pretrained(tmp_path / "first")
    loaded = BHyTLlamaConfig.from_pretrained(tmp_path / "first")
    loaded.save_pretrained(tmp_path / "second")
    texts = [(tmp_path / folder / "config.json").read_text() for folder in ("first", "second")]
    assert texts[0] == texts[1]
    for name in BHyTLlamaConfig.__annotations__:
        assert getattr(loaded, name) == getattr(config, name)
        assert type(getattr(loaded, name)) is type(getattr(config, name))


def test_value_set_after_construction_is_refused_when_a_model_is_built(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    with pytest.raises(REFUSED, match="kappa is -5.0"):
        BHyTLlamaForCausalLM.from_pretrained(tmp_path, kappa=-5.0)
    with pytest.raises(REFUSED, match="kappa is -5.0"):
        BHyTLlamaForCausalLM(BHyTLlamaConfig.from_pretrained(tmp_path, kappa=-5.0))
    config = config_of()
    config.exact_variance_layers = [7]
    with pytest.raises(REFUSED, match="names layer 7"):
        BHyTLlamaForCausalLM(config)
    assert BHyTLlamaForCausalLM.from_pretrained(tmp_path, kappa=5.0).model.layers[0].input_layernorm.kappa == 5.0


def test_auto_map_is_complete_in_every_saved_folder(tmp_path):
    prefixed = {"AutoConfig": "user/repo--configuration_bhyt.X", "AutoModel": "user/repo--modeling_bhyt.X"}
    config_of().save_pretrained(tmp_path / "config")
    config_of(auto_map=prefixed).save_pretrained(tmp_path / "prefixed")
    BHyTLlamaConfig.from_pretrained(tmp_path / "prefixed").save_pretrained(tmp_path / "again")
    tiny_model().save_pretrained(tmp_path / "model")
    BHyTLlamaForCausalLM.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "model again")
    for folder in ("config", "prefixed", "again", "model", "model again"):
        assert json.loads((tmp_path / folder / "config.json").read_text())["auto_map"] == AUTO_MAP, folder
    assert set(AUTO_MAP) > {"AutoConfig", "AutoModel", "AutoModelForCausalLM"}


@pytest.mark.parametrize(
    "width, alpha",
    {
        576: [1.0, 1.0, 1.0],
        1024: [1.0, 1.0, 1.0],
        1200: [1.0, 1.0, 1.0],
        1800: [1.0, 0.5, 0.5],
        2048: [1.0, 0.5, 0.5],
        3600: [0.8, 0.2, 0.2],
        4096: [0.8, 0.2, 0.2],
        5000: [0.6, 0.15, 0.15],
        5120: [0.6, 0.15, 0.15],
        7680: [0.2, 0.05, 0.05],
        8192: [0.2, 0.05, 0.05],
        16384: [0.2, 0.05, 0.05],
    }.items(),
)
def test_default_dyt_alpha_is_that_of_the_nearest_width(width, alpha):
    assert config_of(norm_type="dyt", hidden_size=width).dyt_alpha == alpha


@pytest.mark.parametrize("norm_type", ["bhyt", "bhyt_star"])
def test_depth_bounds_name_every_site_and_the_limit(norm_type):
    bounds = config_of(norm_type=norm_type, kappa=4, attention_lambda=[1, 2, 3], mlp_lambda=0.5).depth_bounds()
    assert [(bound.layer, bound.site) for bound in bounds] == [(n, s) for n in range(3) for s in ("attention", "mlp")]
    assert [bound.nominal for bound in bounds] == [0.25, 0.125, 0.5, 0.125, 0.75, 0.125]
    assert all(bound.effective == bound.nominal and bound.limit == 1 / math.sqrt(3) for bound in bounds)
    assert [bound.holds for bound in bounds] == [True, True, True, True, False, True]


def test_broken_depth_bound_warns_and_does_not_raise(warned):
    config_of(kappa=4, attention_lambda=[1, 2, 3])
    (message,) = warned
    assert "0.75" in message and "attention site of layer 2" in message and "0.5774" in message
    assert "1 of 6 sites" in message and "smaller lambda or a larger kappa" in message


def test_depth_bound_is_strict(warned):
    config_of(num_hidden_layers=100, attention_lambda=0.99, mlp_lambda=0.99)
    assert warned == []
    assert not config_of(num_hidden_layers=100, attention_lambda=1, mlp_lambda=1).depth_bounds()[0].holds
    assert len(warned) == 1


@pytest.mark.parametrize("norm_type", ["rmsnorm", "peri_ln", "lns", "dyt"])
def test_norms_without_a_depth_bound_report_none(norm_type, warned):
    assert config_of(norm_type=norm_type, attention_lambda=100).depth_bounds() == [] and warned == []
    assert tiny_model(norm_type).depth_bounds() == []


@pytest.mark.parametrize("norm_type", ["bhyt", "bhyt_star"])
def test_depth_bounds_of_a_model_follow_its_parameters(norm_type):
    model = tiny_model(norm_type, kappa=4)
    norm = model.model.layers[1].post_attention_layernorm
    norm.lam.data.fill_(-1.5)
    norm.weight.data.copy_(2.0 * (-1.0) ** norm.weight.new_tensor(range(64)))
    bound = model.depth_bounds()[3]
    assert (bound.layer, bound.site) == (1, "mlp")
    assert (bound.nominal, bound.effective) == pytest.approx((0.375, 0.75))
    assert not bound.holds and bound.limit == 1 / math.sqrt(3)
    assert model.model.depth_bounds() == model.depth_bounds()


def test_other_version_warns_and_is_stamped_anew(warned):
    config = config_of(bhyt_version="0.0.1")
    (message,) = warned
    assert "0.0.1" in message and __version__ in message
    assert config.bhyt_version == __version__ == config_of().bhyt_version


def test_rope_fields_of_old_checkpoints_are_read():
    config = config_of(rope_theta=500000, rope_scaling={"type": "linear", "factor": 4})
    rope = config.rope_parameters
    assert (rope["rope_theta"], rope["rope_type"], rope["factor"]) == (500000, "linear", 4)
    assert BHyTLlamaForCausalLM(config).model.rotary_emb.rope_type == "linear"
