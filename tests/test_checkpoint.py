"""Saved folders are read bit for bit, and never half: whatever lacks a tensor is refused with the way out."""

import pytest
import torch
from conftest import TINY, tiny_llama, tiny_model
from safetensors.torch import load_file, save_file
from saved_models import assert_states_equal, outputs, train_two_steps, with_distinct_vectors
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaForCausalLM

from modeling_bhyt import BHyTLlamaConfig, BHyTLlamaForCausalLM, BHyTLlamaForSequenceClassification


REMEDY = "python -m conversion"


def edit_weights(folder, edit):
    """Rewrites the weight file of a saved folder with `edit(tensors)`, which changes the dict in place."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_tensor_is_loaded_bit_for_bit(tmp_path, norm_type, dtype):
    model = with_distinct_vectors(tiny_model(norm_type)).to(dtype)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert type(loaded) is BHyTLlamaForCausalLM
    assert_states_equal(loaded.state_dict(), model.state_dict())


def test_resumed_training_ends_where_uninterrupted_training_does(tmp_path):
    uninterrupted = train_two_steps(tmp_path).state_dict()
    resumed = train_two_steps(tmp_path, resume=True, seed=9).state_dict()
    for name, tensor in uninterrupted.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=0, atol=1e-7, msg=name)
        if "variance_" in name:
            assert torch.equal(resumed[name], tensor) and tensor.item() != 0, name


@pytest.mark.parametrize("loader", [BHyTLlamaForCausalLM, AutoModelForCausalLM, BHyTLlamaForSequenceClassification])
@pytest.mark.parametrize(
    ("norm_type", "tensor"),
    [
        ("bhyt", "model.layers.1.input_layernorm.lam"),
        ("bhyt", "model.layers.1.post_attention_layernorm.variance_ratio"),
        ("bhyt", "model.layers.0.post_attention_layernorm.variance_offset"),
        ("bhyt", "model.layers.2.input_layernorm.weight"),
        ("bhyt", "model.norm.weight"),
        ("bhyt", "model.layers.0.mlp.up_proj.weight"),
        ("bhyt_star", "model.layers.2.post_attention_layernorm.lam"),
        ("peri_ln", "model.layers.2.mlp_output_layernorm.weight"),
        ("dyt", "model.embed_norm.scale"),
        ("dyt", "model.norm.alpha"),
        ("dyt", "model.layers.0.input_layernorm.bias"),
    ],
)
def test_a_missing_tensor_is_refused_by_name_and_remedy(tmp_path, loader, norm_type, tensor):
    tiny_model(norm_type).save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda tensors: tensors.pop(tensor))
    with pytest.raises(ValueError, match=REMEDY) as refusal:
        loader.from_pretrained(tmp_path)
    assert tensor in str(refusal.value) and str(tmp_path) in str(refusal.value)


def test_a_missing_untied_head_is_refused(tmp_path):
    tiny_model(tie_word_embeddings=False).save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="lm_head.weight.*load it with AutoModel"):
        BHyTLlamaForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("tensor", ["model.layers.1.input_layernorm.lam", "model.layers.1.input_layernorm.weight"])
def test_a_tensor_of_another_shape_is_never_replaced_silently(tmp_path, tensor):
    tiny_model().save_pretrained(tmp_path)
    edit_weights(tmp_path, lambda tensors: tensors.update({tensor: tensors[tensor].sum()}))
    with pytest.raises((ValueError, RuntimeError)):
        BHyTLlamaForCausalLM.from_pretrained(tmp_path)
    # Unless the caller says so: then it starts anew, and the loading info names it
    model, info = BHyTLlamaForCausalLM.from_pretrained(
        tmp_path, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert {key for key, *_ in info["mismatched_keys"]} == {tensor}
    assert (model.get_parameter(tensor) == 1).all()


def test_a_head_with_another_number_of_labels_starts_anew(tmp_path):
    tiny_model(model_class=BHyTLlamaForSequenceClassification, num_labels=3).save_pretrained(tmp_path)
    model = BHyTLlamaForSequenceClassification.from_pretrained(tmp_path, num_labels=5, ignore_mismatched_sizes=True)
    assert model.score.weight.shape[0] == 5


@pytest.mark.parametrize("override", [{}, {"norm_type": "rmsnorm"}, {"norm_type": "lns"}, {"norm_type": "dyt"}])
def test_a_plain_llama_folder_is_refused(tmp_path, override):
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=REMEDY):
        BHyTLlamaForCausalLM.from_pretrained(tmp_path, **override)
    # Also where the caller's own configuration hides the folder's
    with pytest.raises(ValueError, match=REMEDY):
        BHyTLlamaForCausalLM.from_pretrained(tmp_path, config=BHyTLlamaConfig(**{**TINY, **override}))


@pytest.mark.parametrize("norm_type", ["bhyt", "bhyt_star", "dyt"])
def test_the_llama_class_finds_unexpected_keys_at_every_replaced_norm(tmp_path, norm_type):
    tiny_model(norm_type).save_pretrained(tmp_path)
    _, info = LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    owners = {name.rsplit(".", 1)[0] for name in info["unexpected_keys"]}
    sites = ["input_layernorm", "post_attention_layernorm"]
    assert {f"model.layers.{layer}.{site}" for layer in range(3) for site in sites} <= owners


def test_tied_embeddings_share_storage_after_load_and_resize_and_untied_ones_do_not(tmp_path, token_ids):
    for tied in True, False:
        saved = tiny_model(tie_word_embeddings=tied)
        saved.save_pretrained(tmp_path / str(tied))
        assert ("lm_head.weight" in load_file(tmp_path / str(tied) / "model.safetensors")) is not tied
        model = BHyTLlamaForCausalLM.from_pretrained(tmp_path / str(tied))
        assert torch.equal(outputs(model, token_ids), outputs(saved, token_ids))
        for size in None, 310, 290:
            if size:
                model.resize_token_embeddings(size)
            embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
            assert (embedding.data_ptr() == head.data_ptr()) is tied
            assert torch.equal(embedding, head) is tied
        again = tmp_path / f"{tied} again"
        model.save_pretrained(again)
        assert_states_equal(BHyTLlamaForCausalLM.from_pretrained(again).state_dict(), model.state_dict())


@pytest.mark.parametrize("learnable_lambda", [True, False])
@pytest.mark.parametrize("learnable_variance", [True, False])
def test_constants_stay_frozen_after_every_kind_of_load(tmp_path, learnable_lambda, learnable_variance):
    flags = {"learnable_lambda": learnable_lambda, "learnable_variance": learnable_variance}
    saved = tiny_model(**flags)
    saved.save_pretrained(tmp_path)
    state = saved.state_dict()
    resumed = tiny_model(seed=3, **flags)
    resumed.load_state_dict(state)
    assigned = tiny_model(seed=3, **flags)
    assigned.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
    other = tmp_path / "other flags"
    tiny_model(learnable_lambda=not learnable_lambda, learnable_variance=not learnable_variance).save_pretrained(other)
    for kind, model in {
        "made": saved,
        "loaded": BHyTLlamaForCausalLM.from_pretrained(tmp_path),
        "cast": BHyTLlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16),
        "auto": AutoModelForCausalLM.from_pretrained(tmp_path),
        "base": AutoModel.from_pretrained(tmp_path),
        "with a new head": AutoModelForSequenceClassification.from_pretrained(tmp_path),
        "placed": BHyTLlamaForCausalLM.from_pretrained(tmp_path, device_map="cpu"),
        "offloaded": BHyTLlamaForCausalLM.from_pretrained(
            tmp_path, device_map={"model": "disk", "lm_head": "cpu"}, offload_folder=tmp_path / "offloaded"
        ),
        "overridden": BHyTLlamaForCausalLM.from_pretrained(other, **flags),
        "resumed": resumed,
        "assigned": assigned,
    }.items():
        for name, parameter in model.named_parameters():
            trained = learnable_lambda if name.endswith("lam") else learnable_variance if "variance" in name else True
            assert parameter.requires_grad is trained, (kind, name)
