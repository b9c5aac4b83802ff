"""Checkpoints larger than memory: weights that stay on disk, and grafts that never load a model."""

import json
import subprocess
import sys

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from conftest import tiny_llama
from safetensors.torch import load_file
from test_graft import BY_HAND, QUICK, graft, save_source
from transformers import LlamaConfig, LlamaForCausalLM

from conversion import __main__ as command
from conversion.arguments import GraftArguments, parse


UNMEASURED = ["--num_calibration_tokens", "0", "--num_report_tokens", "0"]


def test_weights_on_disk_give_the_same_numbers(tmp_path):
    """accelerate offloads what max_memory leaves no room for; statistics, costs and report come out equal."""
    save_source(tmp_path / "source")
    text = QUICK[: QUICK.index("--calibration_text") + 2]
    reports = []
    for name, memory in (("whole", []), ("disk", ["--max_memory", "cpu=200KB"])):
        words = [str(tmp_path / "source"), str(tmp_path / name), *text, *memory, "--force"]
        command.graft(parse(GraftArguments, words))
        report = json.loads((tmp_path / name / "conversion_report.json").read_text())
        reports.append({key: report[key] for key in ("perplexity", "kl_nats_per_token", "sites", "layers", "choice")})
    assert reports[0] == reports[1]
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "disk"))
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_an_offloaded_source_really_lies_on_disk(tmp_path):
    save_source(tmp_path / "source")
    from conversion.source import read_source

    source = read_source(str(tmp_path / "source"), {"device_map": "auto", "max_memory": {"cpu": "200KB"}})
    assert any(parameter.is_meta for parameter in source.model.parameters())


@pytest.mark.parametrize("basis", ["original", "rotated"])
@pytest.mark.parametrize("estimator", ["uniform_attention", "published"])
def test_a_graft_without_text_loads_no_model_and_keeps_the_limit_gains(tmp_path, monkeypatch, basis, estimator):
    model = tiny_llama()
    model.save_pretrained(tmp_path / "source", max_shard_size="60KB")
    byte_tokenizer().save_pretrained(tmp_path / "source")
    monkeypatch.setattr("conversion.source.AutoModelForCausalLM", None)
    words = [*BY_HAND, "--basis", basis, "--variance_estimator", estimator, *UNMEASURED]
    command.graft(parse(GraftArguments, [str(tmp_path / "source"), str(tmp_path / "out"), *words]))
    shards = sorted((tmp_path / "out").glob("model-*.safetensors"))
    assert len(shards) > 3 and max(shard.stat().st_size for shard in shards) < 90_000
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    assert sum(tensor.nbytes for tensor in tensors.values()) == index["metadata"]["total_size"]
    gain = model.model.layers[1].input_layernorm.weight if basis == "original" else torch.ones(64)
    torch.testing.assert_close(tensors["model.layers.1.input_layernorm.weight"], gain.detach() * 10 / 0.25)
    report = (tmp_path / "out" / "conversion_report.md").read_text()
    assert "| quality | not measured |" in report and "not measured |" in report.split("## Sites")[1]


def test_text_that_is_needed_is_asked_for(tmp_path):
    for flags in ([], [*BY_HAND], ["--variance_estimator", "published"]):
        with pytest.raises(SystemExit):
            parse(GraftArguments, ["a", "b", *flags, *UNMEASURED])


def test_shards_follow_the_flag(tmp_path):
    save_source(tmp_path / "source")
    whole = graft(tmp_path / "source", tmp_path / "whole")
    parts = graft(tmp_path / "source", tmp_path / "parts", "--max_shard_size", "100KB")
    assert len(list((tmp_path / "parts").glob("model-*.safetensors"))) > 2
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), parts.state_dict().values()))
    with pytest.raises(ValueError, match="max_shard_size is 'big': give auto, or a size such as 500MB"):
        graft(tmp_path / "source", tmp_path / "out", "--max_shard_size", "big")


def test_streaming_needs_a_shard_of_memory_and_not_the_checkpoint(tmp_path):
    """A checkpoint of 400 MB in shards of 20 MB is grafted in far less than its size beyond an idle process."""
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        max_position_embeddings=256,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "source", max_shard_size="20MB")
    byte_tokenizer().save_pretrained(tmp_path / "source")
    words = [*BY_HAND, "--basis", "rotated", "--variance_estimator", "uniform_attention", *UNMEASURED]
    code = (
        "import resource, sys\n"
        "from conversion.arguments import GraftArguments, parse\n"
        "from conversion.__main__ import graft\n"
        "idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "graft(parse(GraftArguments, sys.argv[1:]))\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - idle)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "source", "out", *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    size = sum(file.stat().st_size for file in (tmp_path / "source").glob("*.safetensors"))
    assert size > 380e6 and int(done.stdout.split()[-1]) * 1024 < 0.6 * size
