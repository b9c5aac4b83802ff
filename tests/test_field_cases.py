"""Trouble that people report with conversions: massive activations, vocabularies, checkpoints of another kind."""

import json
import shutil
import sys
from collections import namedtuple

import pytest
import torch
from byte_tokenizer import byte_tokenizer
from conftest import tiny_llama, tiny_model
from safetensors.torch import load_file, save_file
from test_graft import QUICK, edit_json, graft, save_source
from test_source import refusal
from tokenizers import AddedToken
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from conversion import __main__ as command
from conversion.arguments import GraftArguments, parse
from conversion.source import read_source
from modeling_bhyt.normalization_bhyt import BHyT


TEXT = QUICK[: QUICK.index("--calibration_text") + 2]


def run(monkeypatch, *words) -> int:
    monkeypatch.setattr(sys, "argv", ["conversion", *map(str, words)])
    with pytest.raises(SystemExit) as done:
        command.main()
    return done.value.code


def save_wide(folder, spike: float):
    """Two layers of width 1024, where a value over its root mean square may be 32; a channel of BOS stands out."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=1024,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
        model.model.embed_tokens.weight[:, 7] *= spike
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def test_massive_activations_are_flagged_where_they_are(tmp_path):
    """lambda 6 is harmless without the spike, and clips it where it stands out."""
    reports, words = {}, {}
    for name, spike in (("plain", 1.0), ("spiked", 1000.0)):
        save_wide(tmp_path / name, spike)
        flags = ["--variance_estimator", "exact", "--attention_lambda", "6", "--mlp_lambda", "6"]
        graft(tmp_path / name, tmp_path / "out", *flags, "--overwrite")
        reports[name] = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
        words[name] = (tmp_path / "out" / "conversion_report.md").read_text()
    assert max(site["saturated_channels"] for site in reports["plain"]["sites"]) < 0.5
    assert "CLIPPED" not in words["plain"]
    worst = max(reports["spiked"]["sites"], key=lambda site: site["saturated_share"])
    assert (worst["layer"], worst["site"]) == (0, "attention") and 0.5 < worst["saturated_channels"] < 2
    assert "CLIPPED massive activations" in words["spiked"] and "layer 0, attention" in words["spiked"]


def test_auto_keeps_within_its_budget_beside_them(tmp_path):
    save_wide(tmp_path / "source", 1000.0)
    command.graft(
        parse(GraftArguments, [str(tmp_path / "source"), str(tmp_path / "out"), *TEXT, "--basis", "original"])
    )
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert report["verdict"]["passed"] and report["perplexity"]["ratio"] < 1.005


def test_the_rotated_basis_spreads_what_the_original_clips(tmp_path):
    save_wide(tmp_path / "source", 1000.0)
    shares = {}
    for basis in ("original", "rotated"):
        flags = ["--basis", basis, "--variance_estimator", "exact", "--attention_lambda", "6", "--mlp_lambda", "6"]
        graft(tmp_path / "source", tmp_path / basis, *flags)
        report = json.loads((tmp_path / basis / "conversion_report.json").read_text())
        shares[basis] = max(site["saturated_share"] for site in report["sites"])
    assert shares["rotated"] == 0 < shares["original"]


def test_a_missed_budget_saves_nothing_and_exits_with_1(tmp_path, monkeypatch, capsys):
    save_source(tmp_path / "source")
    before = sorted(tmp_path.iterdir())
    words = ["graft", tmp_path / "source", tmp_path / "out", *TEXT, "--budget", "1e-9"]
    assert run(monkeypatch, *words) == 1
    printed = capsys.readouterr()
    assert "nothing was saved" in printed.err and "ABOVE the" in printed.out and sorted(tmp_path.iterdir()) == before
    assert run(monkeypatch, *words, "--force") == 0
    assert not json.loads((tmp_path / "out" / "conversion_report.json").read_text())["verdict"]["passed"]


def test_what_is_all_set_by_hand_is_saved_whatever_it_costs(tmp_path, monkeypatch):
    save_source(tmp_path / "source")
    words = ["graft", tmp_path / "source", tmp_path / "out", *QUICK, "--attention_lambda", "9", "--mlp_lambda", "9"]
    assert run(monkeypatch, *words, "--budget", "1e-9") == 0
    verdict = json.loads((tmp_path / "out" / "conversion_report.json").read_text())["verdict"]
    assert verdict["passed"] and "all of it set by hand" in verdict["sentence"]


def test_gradients_at_a_saturated_unit_are_finite():
    norm = BHyT(1024, lam=8.0)
    x = torch.randn(3, 1024)
    x[:, 7] = 1e5
    x.requires_grad_()
    norm(x).sum().backward()
    assert x.grad.isfinite().all() and norm.lam.grad.isfinite().all() and norm.weight.grad.isfinite().all()


@pytest.mark.parametrize("basis", ["original", "rotated"])
def test_rows_beyond_the_tokenizer_are_kept(tmp_path, basis):
    """The byte tokenizer has 259 ids, the embeddings 300 rows."""
    save_source(tmp_path / "source")
    model = graft(tmp_path / "source", tmp_path / "out", "--basis", basis)
    assert (
        model.model.embed_tokens.weight.shape[0] == 300 and len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 259
    )


def test_a_token_without_a_row_is_refused_and_named(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken(f"<extra{number}>", special=True) for number in range(42)])
    save_source(tmp_path, tokenizer=tokenizer)
    message = refusal(tmp_path)
    assert "'<extra41>' the id 300, but the embeddings have 300 rows" in message
    assert "model.resize_token_embeddings(301)" in message


@pytest.mark.parametrize("pad", [-1, 300])
def test_a_padding_id_without_a_row_is_exchanged_and_said(tmp_path, pad):
    save_source(tmp_path / "source")
    edit_json(tmp_path / "source" / "config.json", pad_token_id=pad)
    model = graft(tmp_path / "source", tmp_path / "out")
    assert model.config.pad_token_id == 0 and model.model.embed_tokens.padding_idx == 0
    report = (tmp_path / "out" / "conversion_report.md").read_text()
    assert f"pad_token_id was {pad}, which is no row of the embeddings: now 0 (the tokenizer's)" in report
    # The last row of the vocabulary is a token like any other
    model.train()
    ids = torch.tensor([[5, 299, 7]])
    model(input_ids=ids, labels=ids).loss.backward()
    assert model.model.embed_tokens.weight.grad[299].abs().sum() > 0


def test_a_new_row_starts_at_the_mean_and_changes_no_other_logit():
    model = tiny_model()
    ids = torch.arange(3, 40).unsqueeze(0)
    with torch.no_grad():
        before = model(ids).logits
        model.resize_token_embeddings(301)
        after = model(ids).logits
    torch.testing.assert_close(after[..., :300], before)
    rows = model.model.embed_tokens.weight.detach()
    torch.testing.assert_close(rows[300], rows[:300].mean(0), atol=1e-3, rtol=1e-3)


def kinds(folder):
    """Folders of checkpoints that cannot be grafted, each with a part of the reason."""

    def config(name, **values):
        (folder / name).mkdir()
        tiny_llama().config.save_pretrained(folder / name)
        edit_json(folder / name / "config.json", **values)
        return folder / name

    quantised = {
        "gptq": {"quant_method": "gptq", "bits": 4},
        "awq": {"quant_method": "awq"},
        "4-bit": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    }
    for name, settings in quantised.items():
        config(name, quantization_config=settings)
        yield name, f"is quantised ({settings['quant_method']})"
    (config("adapter") / "adapter_config.json").write_text("{}")
    yield "adapter", "merge it into its base model first"
    config("layernorm", model_type="gpt_neox")
    yield "layernorm", "it uses LayerNorm"
    config("query norm", model_type="qwen3")
    yield "query norm", "it normalises queries and keys"
    torch.save({"a": 1}, config("pickle") / "pytorch_model.bin")
    yield "pickle", "save its pickle as safetensors first"
    tiny_llama().save_pretrained(folder / "shards", max_shard_size="200KB")
    sorted((folder / "shards").glob("model-*.safetensors"))[1].unlink()
    yield "shards", "complete the download"
    model = save_source(folder / "nan")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    model.save_pretrained(folder / "nan")
    yield "nan", "model.layers.1.mlp.up_proj.weight holds NaN or infinity"


def test_what_cannot_be_grafted_is_refused_before_anything_is_written(tmp_path, monkeypatch, capsys):
    for name, reason in kinds(tmp_path):
        before = sorted(tmp_path.rglob("*"))
        assert run(monkeypatch, "graft", tmp_path / name, tmp_path / "out", *TEXT) == 2, name
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
        assert len(errors) == 1 and reason in errors[0], (name, errors)
        assert sorted(tmp_path.rglob("*")) == before


def test_no_room_on_the_disk_is_found_out_at_the_start(tmp_path, monkeypatch, capsys):
    save_source(tmp_path / "source")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(10**9, 10**9, 1000))
    assert run(monkeypatch, "graft", tmp_path / "source", tmp_path / "out", *TEXT) == 2
    assert "but 0.00 GB are free on its disk" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_legal_texts_of_the_source_travel_with_the_graft(tmp_path):
    save_source(tmp_path / "source")
    (tmp_path / "source" / "LICENSE.txt").write_text("Do as you like.")
    (tmp_path / "source" / "NOTICE").write_text("Made by someone.")
    (tmp_path / "source" / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    graft(tmp_path / "source", tmp_path / "out")
    assert (tmp_path / "out" / "LICENSE.txt").read_text() == "Do as you like."
    assert (tmp_path / "out" / "NOTICE").read_text() == "Made by someone."
    assert "license: apache-2.0\n" in (tmp_path / "out" / "README.md").read_text()


def test_a_mixed_dtype_source_is_rotated_and_measured(tmp_path):
    save_source(tmp_path / "source", dtype=torch.bfloat16)
    file = tmp_path / "source" / "model.safetensors"
    mixed = {name: t.float() if "norm" in name else t for name, t in load_file(file).items()}
    save_file(mixed, file, metadata={"format": "pt"})
    assert read_source(str(tmp_path / "source")).tensors["model.norm.weight"].dtype == torch.float32
    graft(tmp_path / "source", tmp_path / "out", "--basis", "rotated")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(t.dtype) for name, t in after.items() if "norm" not in name} == {"torch.bfloat16"}
