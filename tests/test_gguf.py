"""GGUF sources, on tiny files that this test writes: nothing may get lost between their metadata and ours."""

import numpy as np
import pytest
import torch
from conftest import tiny_llama
from gguf import GGUFWriter
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from conversion.gguf_source import read_gguf


TEMPLATE = "{% for message in messages %}<|a|>{{ message['content'] }}<|b|>{% endfor %}"
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(weight, num_heads):
    """GGUF stores the rows of W_Q and W_K with the halves of each head interleaved."""
    rows, columns = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def vocabulary(size):
    """(tokens, types, merges): three control tokens, the bytes' letters, one merge, and the rest unused."""
    letters = ["<pad>", "<|a|>", "<|b|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    letters += [f"<unused{n}>" for n in range(size - len(letters))]
    return letters, [3 if letter.startswith("<") and len(letter) > 1 else 1 for letter in letters], ["h e"]


def write_gguf(path, model, add_bos=False, extra=(), tensors=(), architecture="llama", words=None):
    config = model.config
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    letters, types, merges = words or vocabulary(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(letters)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)
    for add, *arguments in extra:
        getattr(writer, add)(*arguments)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            part, kind = rest.rsplit(".", 1)
            heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
            array = permuted(array, heads[part]) if part in heads and architecture == "llama" else array
            name = f"blk.{layer}.{NAMES[part]}.{kind}"
        else:
            top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            name = top[name.removesuffix(".weight")] + ".weight"
        writer.add_tensor(name, np.ascontiguousarray(array))
    for name, array in tensors:
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(model):
    with torch.no_grad():
        return model.eval()(torch.arange(3, 200).unsqueeze(0)).logits


def with_rope(model, **rope):
    """The same weights under another RoPE."""
    values = {**model.config.to_dict(), "rope_parameters": {**model.config.rope_parameters, **rope}}
    other = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in values.items() if k != "model_type"}))
    other.load_state_dict(model.state_dict())
    return other


def llama3_factors(model, factor, original):
    """llama.cpp's divisor of each frequency, from the description of Llama 3.1's scaling."""
    frequencies = model.model.rotary_emb.inv_freq.double()
    wavelengths = 2 * torch.pi / frequencies
    smooth = ((original / wavelengths - 1) / 3).clamp(0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).float().numpy()


def test_missing_tensors_and_a_cut_file_are_refused(tmp_path):
    model = tiny_llama()
    state = {name: t for name, t in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.state_dict = lambda: state
    write_gguf(tmp_path / "m.gguf", model)
    with pytest.raises(ValueError, match=r"lacks 1 tensors \(blk.1.ffn_up.weight\)"):
        read_gguf(tmp_path / "m.gguf")
    (tmp_path / "cut.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:300])
    with pytest.raises(ValueError, match="cut.gguf is not a whole GGUF file"):
        read_gguf(tmp_path / "cut.gguf")


def test_plain_file_gives_equal_logits_and_clean_numbers(tmp_path):
    model = tiny_llama(rms_norm_eps=1e-5)
    write_gguf(tmp_path / "m.gguf", model)
    read, _, _, quantization = read_gguf(tmp_path / "m.gguf")
    assert (logits(read) - logits(model)).abs().max() < 1e-5
    assert read.config.rms_norm_eps == 1e-5 and quantization is None


@pytest.mark.parametrize("add_bos", [False, True])
def test_tokenizer_facts_equal_the_files(tmp_path, add_bos):
    write_gguf(tmp_path / "m.gguf", tiny_llama(), add_bos=add_bos)
    _, tokenizer, _, _ = read_gguf(tmp_path / "m.gguf")
    for token, number in (("<|a|>", 1), ("<|b|>", 2), ("<unused3>", 263)):
        assert tokenizer(token, add_special_tokens=False).input_ids == [number]
    assert (tokenizer("hello").input_ids[0] == 1) == add_bos and tokenizer("hello").input_ids[-1] != 2
    assert tokenizer.chat_template == TEMPLATE and (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_linear_scaling_is_carried_over(tmp_path):
    model = tiny_llama()
    extra = [("add_string", "llama.rope.scaling.type", "linear"), ("add_float32", "llama.rope.scaling.factor", 4.0)]
    write_gguf(tmp_path / "m.gguf", model, extra=extra)
    read, _, _, _ = read_gguf(tmp_path / "m.gguf")
    assert (logits(read) - logits(with_rope(model, rope_type="linear", factor=4.0)))[:, 150].abs().max() < 1e-4
    assert (logits(read) - logits(model))[:, 150].abs().max() > 1e-3


@pytest.mark.parametrize("factor,original,context", [(8.0, 8192, 131072), (4.0, 64, 256)])
def test_llama3_frequencies_are_carried_over(tmp_path, factor, original, context):
    model = tiny_llama(max_position_embeddings=context, rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    factors = llama3_factors(model, factor, original)
    write_gguf(tmp_path / "m.gguf", model, tensors=[("rope_freqs.weight", factors)])
    read, _, _, _ = read_gguf(tmp_path / "m.gguf")
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    reference = with_rope(model, rope_type="llama3", original_max_position_embeddings=original, **scaling)
    assert (logits(read) - logits(reference))[:, 150].abs().max() < 1e-4
    expected = model.model.rotary_emb.inv_freq / torch.from_numpy(factors)
    torch.testing.assert_close(read.model.rotary_emb.inv_freq, expected, rtol=1e-3, atol=0)
    assert (logits(read) - logits(model)).abs().max() > 1e-4


@pytest.mark.parametrize(
    "extra,tensors,named",
    [
        ([("add_string", "llama.rope.scaling.type", "yarn")], [], "llama.rope.scaling.type is 'yarn'"),
        ([], [("rope_freqs.weight", np.linspace(1, 5, 8, dtype=np.float32))], "rope_freqs.weight"),
        ([], [("blk.0.attn_q.bias", np.ones(64, dtype=np.float32))], "blk.0.attn_q.bias"),
        ([("add_uint32", "llama.attention.key_length", 32)], [], "llama.rope.dimension_count is 16 of 32"),
    ],
)
def test_what_cannot_be_carried_over_is_refused_by_name(tmp_path, extra, tensors, named):
    write_gguf(tmp_path / "m.gguf", tiny_llama(), extra=extra, tensors=tensors)
    with pytest.raises(ValueError, match=named):
        read_gguf(tmp_path / "m.gguf")
