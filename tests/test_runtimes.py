"""Inference as people run it: attention kernels, caches, decoding methods, compilers, half precision, offload."""

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from conftest import NORM_TYPES, tiny_model
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import pipeline

from modeling_bhyt import BHyTLlamaConfig, BHyTLlamaForCausalLM


PROMPT = torch.tensor([[5, 17, 230, 44, 99, 5, 17, 230]])
NEW = 6


def logits_of(model, token_ids):
    with torch.no_grad():
        return model(token_ids).logits


def generate(model, token_ids=PROMPT, **kwargs):
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    torch.manual_seed(0)
    return model.generate(token_ids, attention_mask=torch.ones_like(token_ids), **{**options, **kwargs})


def gradients(model, token_ids, call=None):
    """Loss and every gradient, by name; `call` stands in for the model, as a compiled copy of it."""
    model.zero_grad()
    loss = (model if call is None else call)(token_ids, labels=token_ids, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def test_eager_and_sdpa_attention_agree(norm_type, token_ids):
    eager, sdpa = (tiny_model(norm_type, attn_implementation=kind) for kind in ("eager", "sdpa"))
    torch.testing.assert_close(logits_of(eager, token_ids), logits_of(sdpa, token_ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("norm_type", ["bhyt", "peri_ln", "dyt"])
def test_every_way_of_greedy_decoding_gives_the_same_text(norm_type):
    model, assistant = tiny_model(norm_type), tiny_model(norm_type, seed=7, num_hidden_layers=1)
    expected = generate(model)
    assert expected.shape[1] == PROMPT.shape[1] + NEW
    for way in (
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 3},
        {"prompt_lookup_num_tokens": 3},
        {"assistant_model": assistant},
    ):
        assert torch.equal(generate(model, **way), expected), way


def test_greedy_decoding_follows_the_full_forward_pass(norm_type):
    model = tiny_model(norm_type)
    generated = generate(model)
    predicted = logits_of(model, generated)[:, PROMPT.shape[1] - 1 : -1].argmax(-1)
    assert torch.equal(predicted, generated[:, PROMPT.shape[1] :])


def test_left_padding_does_not_change_a_generated_row():
    model = tiny_model()
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), PROMPT], dim=1)
    mask = (torch.arange(12) >= 4).long()[None]
    torch.testing.assert_close(
        model.generate(padded, attention_mask=mask, max_new_tokens=8, do_sample=False)[:, 4:],
        model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=8, do_sample=False),
    )


def test_beams_and_samples_are_the_same_with_every_cache():
    model = tiny_model()
    for way in (
        {"num_beams": 3, "num_return_sequences": 3},
        {"do_sample": True, "top_k": 5},
        {"do_sample": True, "num_beams": 2},
    ):
        expected = generate(model, use_cache=False, **way)
        assert torch.equal(generate(model, **way), expected), way
        assert torch.equal(generate(model, cache_implementation="static", **way), expected), way


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_and_autocast_stay_finite_forward_and_backward(norm_type, dtype, token_ids):
    model = tiny_model(norm_type)
    with torch.autocast("cpu", dtype):
        loss, grads = gradients(model, token_ids)
    assert loss.isfinite() and all(grad.isfinite().all() for grad in grads.values())
    half = tiny_model(norm_type).to(dtype)
    assert generate(half, max_new_tokens=2, min_new_tokens=2).shape[1] == PROMPT.shape[1] + 2
    loss, grads = gradients(half, token_ids)
    assert loss.isfinite() and all(grad.isfinite().all() for grad in grads.values())
    assert logits_of(half, token_ids).dtype == dtype


@pytest.mark.parametrize(
    ("norm_type", "backend"), [("bhyt", "aot_eager"), *((norm_type, "eager") for norm_type in NORM_TYPES)]
)
def test_compiled_model_is_one_graph_with_equal_gradients(norm_type, backend, token_ids):
    model = tiny_model(norm_type, num_hidden_layers=2, learnable_variance=norm_type == "bhyt")
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    expected_loss, expected = gradients(model, token_ids)
    loss, actual = gradients(model, token_ids, call=compiled)
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=1e-5)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5)
    assert counter.frame_count == 1 and not torch._dynamo.utils.counters["graph_break"]


def test_compiled_model_follows_a_changed_constant_without_compiling_again(token_ids):
    model = tiny_model(learnable_lambda=False)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    before = compiled(token_ids, use_cache=False).logits
    for name in "lam", "variance_offset", "variance_ratio":
        for layer in model.model.layers:
            getattr(layer.post_attention_layernorm, name).data.mul_(20)
        with torch._dynamo.config.patch(error_on_recompile=True):
            after = compiled(token_ids, use_cache=False).logits
        torch.testing.assert_close(after, model(token_ids).logits, rtol=0, atol=1e-5)
        assert not torch.allclose(after, before, atol=1e-4), name
        before = after


def test_layers_compiled_one_by_one_share_one_compilation(norm_type, token_ids):
    model = tiny_model(
        norm_type, num_hidden_layers=4, attention_lambda=[1.0, 0.9, 0.8, 0.7], mlp_lambda=[0.7, 0.6, 0.5, 0.4]
    )
    expected = model(token_ids, use_cache=False).logits
    counter = CompileCounterWithBackend("eager")
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend=counter)
    torch.testing.assert_close(model(token_ids, use_cache=False).logits, expected, rtol=0, atol=1e-5)
    # The factor of "lns" is a number that differs a layer: a constant at first, a symbol from the second layer on
    assert counter.frame_count == (2 if norm_type == "lns" else 1)


@pytest.mark.parametrize("norm_type", ["bhyt", "peri_ln", "dyt"])
def test_exported_program_gives_equal_logits(norm_type, token_ids):
    model = tiny_model(norm_type, num_hidden_layers=2)
    program = torch.export.export(model, (token_ids,), {"use_cache": False}, strict=False)
    exported = program.module()(token_ids, use_cache=False)
    torch.testing.assert_close(exported.logits, logits_of(model, token_ids), rtol=0, atol=1e-5)


def test_text_generation_pipeline_answers_a_prompt_and_a_chat(tmp_path):
    model, tokenizer = tiny_model(), byte_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    generator = pipeline("text-generation", str(tmp_path), device="cpu")
    assert type(generator.model) is BHyTLlamaForCausalLM
    ids = tokenizer("once", return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=4, do_sample=False)
    text = generator("once", max_new_tokens=4, do_sample=False)[0]["generated_text"]
    assert text == tokenizer.decode(expected[0], skip_special_tokens=True)
    chat = generator([{"role": "user", "content": "once"}], max_new_tokens=4, do_sample=False)
    assert chat[0]["generated_text"][-1]["role"] == "assistant"


@pytest.mark.parametrize("norm_type", ["bhyt", "dyt"])
def test_model_built_empty_and_dispatched_equals_the_saved_one(tmp_path, norm_type, token_ids):
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    model = tiny_model(norm_type)
    model.save_pretrained(tmp_path)
    with init_empty_weights():
        empty = BHyTLlamaForCausalLM(BHyTLlamaConfig.from_pretrained(tmp_path))
    assert all(parameter.is_meta for parameter in empty.parameters())
    filled = load_checkpoint_and_dispatch(empty, tmp_path, device_map={"": "cpu"}).eval()
    assert torch.equal(logits_of(filled, token_ids), logits_of(model, token_ids))
    for (name, parameter), original in zip(filled.named_parameters(), model.parameters()):
        assert parameter.requires_grad is original.requires_grad, name


@pytest.mark.parametrize("norm_type", ["bhyt", "peri_ln", "dyt"])
def test_layers_offloaded_to_disk_give_equal_logits_and_can_be_saved_again(tmp_path, norm_type, token_ids):
    model = tiny_model(norm_type)
    model.save_pretrained(tmp_path / "saved")
    places = {"model.layers.1": "disk", "model.layers.2": "disk"}
    rest = ["model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"]
    rest += ["model.embed_norm"] if norm_type == "dyt" else []
    offloaded = BHyTLlamaForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=places | dict.fromkeys(rest, "cpu"), offload_folder=tmp_path / "offloaded"
    )
    assert all(parameter.is_meta for parameter in offloaded.model.layers[2].parameters())
    assert torch.equal(logits_of(offloaded, token_ids), logits_of(model, token_ids))
    offloaded.save_pretrained(tmp_path / "again")
    again = BHyTLlamaForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits_of(again, token_ids), logits_of(model, token_ids))


def test_constants_of_an_offloaded_model_are_not_refreshed_from_absent_weights(tmp_path):
    tiny_model().save_pretrained(tmp_path / "saved")
    offloaded = BHyTLlamaForCausalLM.from_pretrained(
        tmp_path / "saved",
        device_map={"model": "disk", "lm_head": "cpu"},
        offload_folder=tmp_path / "offloaded",
    )
    with pytest.raises(ValueError, match="offloaded"):
        offloaded.refresh_variance_constants()
