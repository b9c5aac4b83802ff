"""Sources from the field: what only looks like a Llama is refused by name, and other files of a folder decide nothing."""

import json
import shutil

import pytest
import torch
from conftest import TINY
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from test_families import save_family
from test_graft import edit_json, graft, save_source
from test_source import refusal
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from checkpoints.weights import weight_names
from conversion.__main__ import main
from conversion.rotation import rotate
from conversion.source import read_source
from sft.base import Base


LLAMAS = [
    {"unsloth_version": "2025.3.1", "unsloth_fixed": True},
    {"_attn_implementation_autoset": True},
    {"transformers.js_config": {"use_external_data_format": {"model.onnx": True}}},
    {"neuron": {"auto_cast_type": "bf16", "batch_size": 1}},
    {"is_llama_config": True, "resid_pdrop": 0.0},
    {"rope_theta": 500000.0, "rope_parameters": "absent", "rope_scaling": None},
    {"torch_dtype": "float32", "dtype": "absent"},
    {"pretraining_tp": 2},
    {"head_dim": 16},
    {"quantization_config": None, "quantization": None},
    {"mlp_bias": False, "attention_bias": False},
    {"rope_interleaved": False},
    {"sliding_window": None, "use_sliding_window": False},
    {"partial_rotary_factor": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1, "attention_multiplier": 0.25},
    {"_name_or_path": "/home/someone/model", "transformers_version": "4.31.0.dev0"},
    {"architectures": None, "auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}},
    {"architectures": ["LLaMAForCausalLM"], "max_sequence_length": 2048},
    {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None},
    {"num_experts": 0, "num_local_experts": None, "qk_norm": False, "clip_qkv": None, "layer_types": None},
    {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 10000.0, "rope_parameters": "absent"},
    {
        "vocab_type": "bpe",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "use_cache": False,
        "task_specific_params": None,
    },
]
CHANGED = [
    {"residual_multiplier": 0.22},
    {"embedding_multiplier": 12},
    {"logits_scaling": 8.0},
    {"attention_multiplier": 0.015625},
    {"logit_scale": 0.0625},
    {"final_logit_softcapping": 30.0},
    {"attn_logit_softcap": 50.0},
    {"clip_qkv": 8.0},
    {"qk_norm": True},
    {"use_qk_norm": True},
    {"sliding_window": 64},
    {"partial_rotary_factor": 0.5},
    {"rotary_pct": 0.25},
    {"num_local_experts": 8},
    {"rope_interleaved": True},
    {"no_rope_layers": [1, 1, 0]},
    {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    {"scale_emb": 12, "scale_depth": 1.4},
    {"mlp_multipliers": [0.5, 0.7]},
    {"query_pre_attn_scalar": 256},
]


@pytest.mark.parametrize("fields", LLAMAS, ids=lambda fields: next(iter(fields)))
def test_llamas_as_they_stand_on_the_hub_are_read(tmp_path, fields):
    save_source(tmp_path)
    edit_json(tmp_path / "config.json", **fields)
    assert read_source(str(tmp_path)).config.hidden_size == TINY["hidden_size"]


@pytest.mark.parametrize("fields", CHANGED, ids=lambda fields: next(iter(fields)))
def test_a_field_that_changes_the_computation_is_refused_by_name_in_every_family(tmp_path, fields):
    families = {"mistral": (MistralForCausalLM, MistralConfig), "qwen2": (Qwen2ForCausalLM, Qwen2Config)}
    save_source(tmp_path / "llama")
    for name, classes in families.items():
        save_family(tmp_path / name, *classes, sliding_window=None)
    for name in ("llama", *families):
        edit_json(tmp_path / name / "config.json", **fields)
        if name != "llama" and {"sliding_window", "layer_types"} & set(fields):
            continue
        message = refusal(tmp_path / name)
        named = next(iter(fields))
        assert f"sets {named} = {fields[named]!r}" in message and f"remove {named} from config.json" in message


def test_code_of_its_own_and_another_head_are_refused_by_name(tmp_path):
    save_source(tmp_path)
    edit_json(tmp_path / "config.json", auto_map={"AutoModelForCausalLM": "modeling_x.XForCausalLM"})
    assert "model code of its own (auto_map: modeling_x.XForCausalLM)" in refusal(tmp_path)
    for other in ("LlamaForSequenceClassification", "LlavaLlamaForCausalLM"):
        edit_json(tmp_path / "config.json", auto_map="absent", architectures=[other])
        assert f"has architecture {other!r}, and only LlamaForCausalLM" in refusal(tmp_path)


def test_fields_that_llama_does_not_read_stand_in_the_report(tmp_path):
    save_source(tmp_path / "source")
    edit_json(tmp_path / "source" / "config.json", unsloth_version="2025.3.1", torch_dtype="float32", pretraining_tp=1)
    graft(tmp_path / "source", tmp_path / "out")
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert report["source"]["not_read_by_llama"] == ["unsloth_version"]
    assert "not read by Llama" in (tmp_path / "out" / "conversion_report.md").read_text()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_numbers_that_mean_something_with_a_scale_alone_are_refused(tmp_path, dtype):
    save_source(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(dtype)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert f"{name} is stored as" in refusal(tmp_path) and "dequantise the checkpoint" in refusal(tmp_path)


@pytest.mark.parametrize("basis", ["original", "rotated"])
def test_advice_to_a_source_that_overflows_in_fp16_helps(tmp_path, basis, capsys):
    model = save_source(tmp_path / "source").half()
    model.model.layers[0].mlp.down_proj.weight.data.fill_(6e4)
    model.save_pretrained(tmp_path / "source")
    flags = ["--attention_lambda", "1", "--mlp_lambda", "1", "--basis", basis]
    with pytest.raises(ValueError, match="overflow in float16.*write it in bfloat16 first"):
        graft(tmp_path / "source", tmp_path / "out", *flags)
    model.to(torch.bfloat16).save_pretrained(tmp_path / "source")
    graft(tmp_path / "source", tmp_path / "out", *flags, "--force")
    assert (tmp_path / "out" / "config.json").is_file()


def test_gains_that_do_not_fit_fp16_are_named_with_a_dtype_that_does(tmp_path):
    model = save_source(tmp_path / "source").half()
    model.model.layers[0].input_layernorm.weight.data.fill_(6e4)
    model.model.layers[0].self_attn.q_proj.weight.data.fill_(3.0)
    model.save_pretrained(tmp_path / "source")
    source = read_source(str(tmp_path / "source"))
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(ValueError, match=f"{name} does not fit float16 .*take --dtype bfloat16 or float32"):
        rotate(source, 0).tensors[name]
    assert rotate(source, 0, "bfloat16").tensors[name].isfinite().all()


def test_stray_safetensors_decide_nothing(tmp_path):
    """consolidated.safetensors lies in most of Mistral's and Meta's repositories, in another dtype."""
    save_source(tmp_path)
    base = Base(str(tmp_path), None, None, {})
    fingerprint, dtypes = base.fingerprint, base.stored_dtypes
    strays = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in strays.items()}, tmp_path / "consolidated.safetensors")
    again = Base(str(tmp_path), None, None, {})
    assert again.fingerprint == fingerprint and again.stored_dtypes == dtypes
    assert set(dtypes.values()) == {torch.float32}
    assert list(read_source(str(tmp_path)).files) == ["model.safetensors"]


def test_an_index_alone_says_which_files_are_the_weights(tmp_path):
    model = save_source(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="200KB")
    names = sorted(path.name for path in (tmp_path / "many").glob("model-*.safetensors"))
    shutil.copy(tmp_path / "one" / "model.safetensors", tmp_path / "many" / "consolidated.safetensors")
    assert weight_names(tmp_path / "many") == names and len(names) > 1
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert weight_names(tmp_path / "adapter") == ["adapter_model.safetensors"]
    for index in ({}, {"weight_map": []}, {"weight_map": {"a": "../b.safetensors"}}, {"weight_map": {"a": 1}}):
        (tmp_path / "many" / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match="has no weight_map to files of its folder"):
            weight_names(tmp_path / "many")


@pytest.mark.parametrize("sharded", [False, True])
def test_stray_safetensors_are_not_downloaded(tmp_path, monkeypatch, sharded):
    save_source(tmp_path / "hub").save_pretrained(tmp_path / "hub", max_shard_size="200KB" if sharded else "5GB")
    if sharded:
        (tmp_path / "hub" / "model.safetensors").unlink()
    for stray in ("consolidated.safetensors", "original.model.safetensors", "model-fp8.safetensors"):
        (tmp_path / "hub" / stray).write_bytes(b"not asked for")
    cache = tmp_path / "cache" / "abc123"

    def download(repository, allow_patterns, revision="main"):
        assert revision in ("main", cache.name)
        cache.mkdir(parents=True, exist_ok=True)
        for file in filter_repo_objects(
            [path.name for path in (tmp_path / "hub").iterdir()], allow_patterns=allow_patterns
        ):
            shutil.copy(tmp_path / "hub" / file, cache)
        return str(cache)

    monkeypatch.setattr("conversion.source.snapshot_download", download)
    source = read_source("someone/some-model")
    fetched = sorted(path.name for path in cache.glob("*.safetensors"))
    assert fetched == sorted(source.files) and len(fetched) == (1 if not sharded else len(weight_names(cache)))


@pytest.mark.parametrize(
    "fields",
    [
        {"num_attention_heads": 0},
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": -1},
        {"vocab_size": -5},
        {"hidden_act": "unheard_of"},
        {"hidden_size": 2**62},
        {"architectures": 7},
        {"rope_parameters": {"rope_type": "unheard_of"}},
        {"rope_parameters": [1]},
        {"auto_map": 3, "head_dim": 10**30},
        {"dtype": "float7"},
        {"max_position_embeddings": "long"},
        {"quantization_config": 3},
    ],
    ids=str,
)
def test_an_impossible_config_is_one_sentence(tmp_path, monkeypatch, capsys, fields):
    save_source(tmp_path / "source")
    edit_json(tmp_path / "source" / "config.json", **fields)
    monkeypatch.setattr("sys.argv", ["conversion", "graft", str(tmp_path / "source"), str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and not (tmp_path / "out").exists()
    said = capsys.readouterr().err
    assert said.splitlines()[-1].startswith("error: ") and "Traceback" not in said


@pytest.mark.parametrize("fields", [{"pad_token_id": "x"}, {"max_new_tokens": {"a": 1}}], ids=str)
def test_settings_of_generation_of_another_kind_are_one_sentence(tmp_path, fields):
    save_source(tmp_path)
    edit_json(tmp_path / "generation_config.json", **fields)
    assert "generation_config.json would not be saved again; mend it first" in refusal(tmp_path)


def test_a_qwen2_without_heads_is_one_sentence(tmp_path):
    save_family(tmp_path, Qwen2ForCausalLM, Qwen2Config)
    edit_json(tmp_path / "config.json", num_attention_heads=0)
    assert "num_attention_heads = 0" in refusal(tmp_path)
