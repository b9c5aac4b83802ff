"""What others do with the model beyond loading it: calls by place, meta devices, folders of one part, generation."""

import inspect

import pytest
import torch
from conftest import TINY, tiny_llama, tiny_model
from transformers import LlamaModel

from modeling_bhyt import BHyTLlamaConfig, BHyTLlamaForCausalLM, BHyTLlamaForSequenceClassification, BHyTLlamaModel


def test_forward_shows_position_ids_which_servers_look_for():
    places = list(inspect.signature(BHyTLlamaModel.forward).parameters)
    assert places[:4] == ["self", "input_ids", "attention_mask", "position_ids"]


@torch.no_grad()
def test_forward_takes_every_argument_by_place_and_by_name(norm_type, token_ids):
    model = tiny_model(norm_type, BHyTLlamaModel)
    mask = torch.ones_like(token_ids)
    mask[0, :3] = 0
    positions = torch.arange(token_ids.shape[1])[None] + 5
    embeddings = model.embed_tokens(token_ids)
    expected = model(input_ids=token_ids, attention_mask=mask, position_ids=positions, use_cache=False)
    by_place = [
        model(token_ids, mask, positions, use_cache=False),
        model(None, mask, positions, None, embeddings),
        model(None, mask, positions, None, embeddings, use_cache=False),
        model(token_ids, mask, positions, None, None),
        model(None, mask, positions, inputs_embeds=embeddings, use_cache=False),
    ]
    for outputs in by_place:
        assert torch.equal(outputs[0], expected[0])
    # A position counts
    assert not torch.equal(model(token_ids, mask, positions * 3)[0], expected[0])


@torch.no_grad()
def test_the_cache_is_taken_by_place_and_by_its_name_in_this_version(norm_type, token_ids):
    model = tiny_model(norm_type, BHyTLlamaModel)
    expected = model(token_ids)[0][:, 6:]
    name = list(inspect.signature(LlamaModel.forward).parameters)[4]
    for by_place in (True, False):
        first = model(token_ids[:, :6], use_cache=True)
        rest = [token_ids[:, 6:], None, None]
        second = model(*rest, first[1]) if by_place else model(*rest, **{name: first[1]})
        torch.testing.assert_close(second[0], expected)


def test_embeddings_given_twice_are_refused():
    model = tiny_model(model_class=BHyTLlamaModel)
    embeddings = torch.zeros(1, 2, TINY["hidden_size"])
    with pytest.raises(TypeError, match="by place and by name"):
        model(None, None, None, None, embeddings, inputs_embeds=embeddings)


ESTIMATORS = ["uniform_attention", "published", "fitted"]


@pytest.mark.parametrize("variance_estimator", ESTIMATORS)
@pytest.mark.parametrize("way", ["init_weights", "apply"])
def test_constants_are_made_after_meta_and_to_empty(variance_estimator, way):
    """torchtitan's way: its Hugging Face backend applies `_init_weights` to every module."""
    config = BHyTLlamaConfig(**TINY, attention_bias=True, variance_estimator=variance_estimator)
    with torch.device("meta"):
        model = BHyTLlamaForCausalLM(config)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights() if way == "init_weights" else model.apply(model._init_weights)
    constants = model.variance_constants()
    assert all(ratio == 1 and offset > 0 for ratio, offset in constants.values())
    if variance_estimator != "fitted":
        computed = model.variance_constants_from_weights()
        assert {n: offset for n, (_, offset) in constants.items()} == pytest.approx(computed, rel=1e-6)


def test_constants_of_a_checkpoint_are_never_made_anew(tmp_path):
    model = tiny_model(variance_estimator="uniform_attention")
    model.set_variance_constants({n: (1.5, 7.0 + n) for n in range(3)})
    model.save_pretrained(tmp_path)
    loaded = BHyTLlamaForCausalLM.from_pretrained(tmp_path)
    assert loaded.variance_constants() == {n: (1.5, 7.0 + n) for n in range(3)}
    loaded.init_weights()
    loaded.apply(loaded._init_weights)
    assert loaded.variance_constants() == {n: (1.5, 7.0 + n) for n in range(3)}


def test_a_folder_of_the_base_model_is_not_called_a_plain_llama(tmp_path):
    tiny_model(model_class=BHyTLlamaModel).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="is the base model alone, without lm_head.weight: load it with AutoModel"
    ) as e:
        BHyTLlamaForCausalLM.from_pretrained(tmp_path)
    assert "plain Llama" not in str(e.value)
    BHyTLlamaModel.from_pretrained(tmp_path)
    # A new head on it is what classification is for
    BHyTLlamaForSequenceClassification.from_pretrained(tmp_path)


def test_a_tied_folder_of_the_base_model_is_a_whole_one(tmp_path, token_ids):
    base = tiny_model(model_class=BHyTLlamaModel, tie_word_embeddings=True)
    base.save_pretrained(tmp_path)
    model = BHyTLlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model.model(token_ids)[0], base(token_ids)[0])


def test_a_bhyt_folder_under_another_configuration_is_not_called_a_plain_llama(tmp_path):
    tiny_model("bhyt").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="of this configuration .*complete the checkpoint") as error:
        BHyTLlamaForCausalLM.from_pretrained(tmp_path, norm_type="dyt")
    assert "plain Llama" not in str(error.value)


def test_a_plain_llama_is_refused_by_that_name(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_type 'llama', not 'bhyt_llama' and lacks .* a plain Llama"):
        BHyTLlamaForCausalLM.from_pretrained(tmp_path)


def test_mismatched_sizes_pass_where_the_caller_asks_and_missing_tensors_do_not(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        BHyTLlamaForCausalLM.from_pretrained(tmp_path, vocab_size=310)
    wider, info = BHyTLlamaForCausalLM.from_pretrained(
        tmp_path, vocab_size=310, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert {key for key, *_ in info["mismatched_keys"]} == {"model.embed_tokens.weight", "lm_head.weight"}
    assert wider.lm_head.weight.shape[0] == 310 and wider.lm_head.weight.isfinite().all()
    assert wider.variance_constants() == model.variance_constants()
    with pytest.raises(ValueError, match="lacks"):
        BHyTLlamaForCausalLM.from_pretrained(tmp_path, norm_type="dyt", ignore_mismatched_sizes=True)
