"""What a source may be, and what is refused before anything is written."""

import json
import shutil

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from conftest import tiny_llama, tiny_model
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from test_graft import edit_json, save_source
from transformers import LlamaConfig

from conversion.source import read_source


def edit_tensors(folder, remove=(), **add):
    file = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(file).items() if name not in remove}
    save_file(tensors | {name.replace("__", "."): t for name, t in add.items()}, file, metadata={"format": "pt"})


def refusal(folder) -> str:
    with pytest.raises(ValueError) as caught:
        read_source(str(folder))
    return str(caught.value)


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_sources_are_read_as_they_are(tmp_path, tied):
    model = save_source(tmp_path, tie_word_embeddings=tied)
    source = read_source(str(tmp_path))
    assert source.config.tie_word_embeddings == tied
    with torch.no_grad():
        ids = torch.arange(3, 60).unsqueeze(0)
        assert torch.equal(source.model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_an_unstated_tie_is_read_off_the_file(tmp_path, tied):
    save_source(tmp_path, tie_word_embeddings=tied)
    edit_json(tmp_path / "config.json", tie_word_embeddings="absent")
    assert read_source(str(tmp_path)).config.tie_word_embeddings == tied


def test_untied_configuration_without_a_head_is_refused(tmp_path):
    save_source(tmp_path, tie_word_embeddings=False)
    edit_tensors(tmp_path, remove=["lm_head.weight"])
    message = refusal(tmp_path)
    assert "tie_word_embeddings = false" in message and "holds no lm_head.weight" in message


def test_tied_configuration_with_another_head_is_refused(tmp_path):
    save_source(tmp_path, tie_word_embeddings=True)
    edit_tensors(tmp_path, lm_head__weight=torch.ones(300, 64))
    message = refusal(tmp_path)
    assert "tie_word_embeddings = true" in message and "lm_head.weight that differs" in message


def test_biases_are_kept_where_the_flags_say_so_and_refused_where_not(tmp_path):
    model = save_source(tmp_path, attention_bias=True, mlp_bias=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.fill_(0.5)
    model.save_pretrained(tmp_path)
    biases = [name for name in read_source(str(tmp_path)).tensors if name.endswith("bias")]
    assert len(biases) == 3 * 7
    edit_json(tmp_path / "config.json", attention_bias=False, mlp_bias=False)
    message = refusal(tmp_path)
    assert "21 unexpected tensors" in message and "model.layers.0.mlp.down_proj.bias" in message
    assert "attention_bias" in message


def test_damaged_and_contradictory_folders_are_one_sentence(tmp_path):
    save_source(tmp_path)
    edit_json(tmp_path / "config.json", quantization_config=None)
    (tmp_path / "README.md").write_text("---\nlicense: [\n---\n")
    assert read_source(str(tmp_path)).licence["license"] is None
    edit_json(tmp_path / "config.json", intermediate_size=96)
    assert "down_proj.weight has shape [64, 128], but config.json makes it [64, 96]" in refusal(tmp_path)
    edit_json(tmp_path / "config.json", intermediate_size=128)
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"model.norm.weight": "absent.safetensors"}}'
    )
    assert len(read_source(str(tmp_path)).tensors) == 30
    for content, reason in (("{", "config.json is not valid JSON"), ("[]", "config.json holds no JSON object")):
        (tmp_path / "broken").mkdir(exist_ok=True)
        (tmp_path / "broken" / "config.json").write_text(content)
        assert reason in refusal(tmp_path / "broken")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert "model.safetensors is damaged" in refusal(tmp_path)


def test_missing_tensors_and_missing_shards_are_named(tmp_path):
    model = save_source(tmp_path)
    edit_tensors(tmp_path, remove=["model.norm.weight"])
    assert "1 missing tensors" in refusal(tmp_path) and "model.norm.weight" in refusal(tmp_path)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="200KB")
    byte_tokenizer().save_pretrained(tmp_path / "sharded")
    shards = sorted((tmp_path / "sharded").glob("model-*.safetensors"))
    assert len(shards) > 1 and len(read_source(str(tmp_path / "sharded")).tensors) == 30
    shards[0].unlink()
    assert f"lacks {shards[0].name} (1 of {len(shards)} weight files)" in refusal(tmp_path / "sharded")


def test_other_kinds_of_checkpoint_are_refused_with_the_reason(tmp_path):
    save_source(tmp_path / "quantised")
    edit_json(tmp_path / "quantised" / "config.json", quantization_config={"quant_method": "awq"})
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    tiny_model().save_pretrained(tmp_path / "bhyt")
    LlamaConfig().save_pretrained(tmp_path / "pickle")
    torch.save({}, tmp_path / "pickle" / "pytorch_model.bin")
    for name, reason in {
        "quantised": "is quantised (awq)",
        "adapter": "merge it into its base model first",
        "empty": "has no config.json",
        "bhyt": "is a BHyT checkpoint already",
        "pickle": "save its pickle as safetensors first",
        "absent/never/was": "no folder at",
        "absent.gguf": "no GGUF file at",
    }.items():
        assert reason in refusal(tmp_path / name), name


def test_a_hub_id_that_cannot_be_reached_is_one_sentence():
    message = refusal("someone/some-model")
    assert message.startswith("someone/some-model is no folder here and could not be read from the Hub")
    assert "\n" not in message


def test_a_hub_id_is_read_from_its_download(tmp_path, monkeypatch):
    """The download itself is huggingface_hub's; here it is replaced by a folder that stands ready."""
    save_source(tmp_path)
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")

    def download(repository, allow_patterns, revision=None):
        (tmp_path / "cache").mkdir(exist_ok=True)
        for file in filter_repo_objects([path.name for path in tmp_path.glob("*.*")], allow_patterns=allow_patterns):
            shutil.copy(tmp_path / file, tmp_path / "cache")
        return str(tmp_path / "cache")

    monkeypatch.setattr("conversion.source.snapshot_download", download)
    source = read_source("someone/some-model")
    assert source.hub_id == "someone/some-model" and source.licence["license"] == "apache-2.0"


def test_invalid_generation_settings_are_repaired_at_the_start_and_named(tmp_path):
    save_source(tmp_path)
    edit_json(tmp_path / "generation_config.json", do_sample=False, temperature=0.6, top_p=0.9)
    source = read_source(str(tmp_path))
    assert "unset temperature = 0.6, top_p = 0.9" in source.notes[0]
    source.generation_config.save_pretrained(tmp_path / "saved")
    # Greedy it was, greedy it stays
    assert not source.generation_config.do_sample
    edit_json(tmp_path / "generation_config.json", do_sample=False, temperature=0.6, max_new_tokens=-1)
    assert "generation_config.json would not be saved again" in refusal(tmp_path)


def test_provenance_holds_digests_and_no_path(tmp_path):
    save_source(tmp_path)
    source = read_source(str(tmp_path))
    (name, described), *_ = source.files.items()
    assert name == "model.safetensors" and len(described["sha256"]) == 64
    assert str(tmp_path) not in json.dumps(source.files) + json.dumps(source.config.to_dict())


def test_reading_a_source_builds_no_model_until_it_is_asked_for(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert "model" not in vars(read_source(str(tmp_path)))
