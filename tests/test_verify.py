"""Verification recomputes a report's figures, and names what differs."""

import json
import sys

import pytest
from safetensors.torch import load_file, save_file
from test_choice import SAMPLED
from test_graft import graft, save_source

from conversion import __main__ as command
from conversion.arguments import ExportArguments, GraftArguments, VerifyArguments, parse


def verify(*words) -> int:
    return command.verify(parse(VerifyArguments, list(map(str, words))))


@pytest.fixture
def folder(tmp_path):
    save_source(tmp_path / "source")
    words = [str(tmp_path / "source"), str(tmp_path / "out"), *SAMPLED]
    command.graft(parse(GraftArguments, words))
    return tmp_path


def test_an_honest_report_is_verified_with_and_without_the_source(folder, capsys):
    assert verify(folder / "out", "--source", folder / "source") == 0
    assert "none differs" in capsys.readouterr().out
    assert verify(folder / "out") == 0
    # In other batches the sums are added in another order
    assert verify(folder / "out", "--source", folder / "source", "--batch_size", "1") == 0


def test_a_changed_figure_and_a_changed_weight_are_named(folder, capsys):
    file = folder / "out" / "conversion_report.json"
    honest = file.read_text()
    report = json.loads(honest)
    report["perplexity"]["model"] *= 0.99
    file.write_text(json.dumps(report))
    assert verify(folder / "out") == 1
    assert "perplexity.model" in capsys.readouterr().out
    file.write_text(honest)
    weights = folder / "out" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.down_proj.weight"] *= 1.3
    tensors["model.layers.2.post_attention_layernorm.lam"] += 0.25
    save_file(tensors, weights, metadata={"format": "pt"})
    assert verify(folder / "out", "--source", folder / "source") == 1
    assert "sites.5.lam" in capsys.readouterr().out


def test_a_named_text_has_to_be_the_same(tmp_path):
    (tmp_path / "held_out.txt").write_text("The quick brown fox jumps over the lazy dog. " * 30)
    (tmp_path / "other.txt").write_text("Pack my box with five dozen liquor jugs. " * 30)
    save_source(tmp_path / "source")
    graft(tmp_path / "source", tmp_path / "out", "--report_text", str(tmp_path / "held_out.txt"))
    assert not list((tmp_path / "out").glob("conversion_windows.*"))
    with pytest.raises(ValueError, match="the report was measured on held_out.txt: name it with --report_text"):
        verify(tmp_path / "out")
    with pytest.raises(ValueError, match="its tokens differ"):
        verify(tmp_path / "out", "--report_text", tmp_path / "other.txt")
    assert verify(tmp_path / "out", "--source", tmp_path / "source", "--report_text", tmp_path / "held_out.txt") == 0


def test_an_export_is_verified_against_its_model(folder):
    words = [str(folder / "out"), str(folder / "plain"), *SAMPLED, "--force"]
    command.export(parse(ExportArguments, words))
    assert verify(folder / "plain", "--source", folder / "out") == 0
    assert verify(folder / "plain") == 0


def test_another_source_and_an_unmeasured_report_are_refused(folder):
    save_source(folder / "other", seed=5)
    with pytest.raises(ValueError, match="the SHA-256 of their weight files differ"):
        verify(folder / "out", "--source", folder / "other")
    graft(folder / "source", folder / "unmeasured", "--num_report_tokens", "0")
    with pytest.raises(ValueError, match="was not measured"):
        verify(folder / "unmeasured")
    with pytest.raises(ValueError, match="has no conversion_report.json"):
        verify(folder / "source")


def test_exit_codes_reach_the_shell(folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["conversion", "verify", str(folder / "out")])
    with pytest.raises(SystemExit) as done:
        command.main()
    assert done.value.code in (0, None)
