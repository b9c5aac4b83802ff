"""What a report, its picture, verify and the answers say is so."""

import json

import matplotlib.pyplot as plt
import pytest
import torch
from byte_tokenizer import byte_tokenizer
from conftest import REPOSITORY, tiny_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from test_choice import SAMPLED
from test_graft import QUICK, graft, save_source
from test_verify import verify
from transformers import GenerationConfig

from conversion import __main__ as command
from conversion import picture
from conversion.arguments import GraftArguments, parse
from conversion.measuring import NATURAL_SHARE
from conversion.rotation import model_of, rotate
from conversion.sampling import sample_windows
from conversion.source import read_source
from evaluation.answers import answer
from evaluation.perplexity import cut_text, protocol


LICENSE = str(REPOSITORY / "LICENSE")


def read(folder) -> dict:
    return json.loads((folder / "conversion_report.json").read_text())


def write(folder, report: dict):
    (folder / "conversion_report.json").write_text(json.dumps(report))


@pytest.fixture
def grafted(tmp_path):
    """A graft whose report was measured on the second part of the calibration's text."""
    save_source(tmp_path / "source")
    graft(tmp_path / "source", tmp_path / "out")
    return tmp_path


def test_verify_succeeds_after_a_graft_on_one_named_text(grafted):
    assert "--calibration_text" in QUICK and "--report_text" not in QUICK
    assert read(grafted / "out")["protocol"]["first_window"] == 384 // 48
    words = ["--source", grafted / "source", "--report_text", LICENSE]
    assert verify(grafted / "out", *words) == 0
    assert verify(grafted / "out", "--report_text", LICENSE) == 0


def test_verify_succeeds_on_a_report_of_version_0_1_0(grafted):
    report = read(grafted / "out")
    del report["protocol"]
    assert report["texts"]["report"].endswith(", another part")
    write(grafted / "out", report)
    assert verify(grafted / "out", "--report_text", LICENSE) == 0


def test_report_and_card_state_the_protocol(grafted):
    stated = read(grafted / "out")["protocol"]
    tokenizer = byte_tokenizer()
    windows, left_over = cut_text(tokenizer, [(REPOSITORY / "LICENSE").read_text()], 48, 12)
    place = {"first_window": 8, "num_left_over_tokens": left_over}
    assert left_over > 0 and stated == protocol(tokenizer, windows[8:]) | place
    assert stated["stride"] == 48 - stated["bos"] and stated["num_tokens"] == 4 * stated["stride"]
    for name in ("README.md", "conversion_report.md"):
        text = (grafted / "out" / name).read_text()
        assert f"stride {stated['stride']} tokens, from window 8 of the text on" in text
        assert f"{stated['num_tokens']} tokens, {stated['num_words']} words, {stated['num_bytes']} bytes" in text


def test_words_and_bytes_are_those_of_the_text_in_the_windows():
    tokenizer = byte_tokenizer()
    document = "Größe und Maß, " * 10
    windows, left_over = cut_text(tokenizer, [document], 20)
    stated = protocol(tokenizer, windows)
    ids = tokenizer(document, add_special_tokens=False).input_ids
    held = tokenizer.decode(ids[: stated["num_tokens"]])
    assert stated["num_words"] == len(held.split()) and stated["num_bytes"] == len(held.encode())


@pytest.mark.parametrize("num_windows", [None, 2])
def test_the_tail_of_a_text_is_counted(num_windows):
    tokenizer = byte_tokenizer()
    stream = tokenizer("x" * 77, add_special_tokens=False).input_ids + [tokenizer.eos_token_id]
    windows, left_over = cut_text(tokenizer, ["x" * 77], 10, num_windows)
    assert left_over == len(stream) - protocol(tokenizer, windows)["num_tokens"] > 0


def test_no_second_weight_file_lies_at_a_folders_top_and_older_folders_still_verify(tmp_path):
    """vLLM loads every *.safetensors of a folder that has no index."""
    save_source(tmp_path / "source")
    command.graft(parse(GraftArguments, [str(tmp_path / "source"), str(tmp_path / "out"), *SAMPLED]))
    out = tmp_path / "out"
    assert [file.name for file in out.glob("*.safetensors")] == ["model.safetensors"]
    assert verify(out) == 0
    windows = torch.tensor(json.loads((out / "conversion_windows.json").read_text())["input_ids"])
    (out / "conversion_windows.json").unlink()
    save_file({"input_ids": windows}, out / "conversion_windows.safetensors")
    assert verify(out, "--source", tmp_path / "source") == 0


def drawn_line(report: dict, file, monkeypatch) -> list[float]:
    """Heights of the horizontal lines of the cost's plot."""
    monkeypatch.setattr(plt, "close", lambda figure: None)
    picture.draw(report, file)
    lines = plt.gcf().axes[0].get_lines()
    plt.clf()
    return [line.get_ydata()[0] for line in lines if line.get_linestyle() == "--"]


@pytest.mark.parametrize("by_hand", [[], ["--attention_lambda", "1"]], ids=["auto", "a lambda by hand"])
def test_the_picture_draws_what_the_last_choice_was_allowed(tmp_path, monkeypatch, by_hand):
    """Of a total over sites, in nats: the budget over NATURAL_SHARE, tightened by each round, and what the hand spends."""
    targets, choices = [], []
    real = command.choose

    def watched(costs, arguments, target):
        targets.append(target)
        choices.append(real(costs, arguments, target))
        return choices[-1]

    monkeypatch.setattr(command, "choose", watched)
    save_source(tmp_path / "source")
    flags = [*SAMPLED, "--budget", "0.000001", "--force", *by_hand]
    command.graft(parse(GraftArguments, [str(tmp_path / "source"), str(tmp_path / "out"), *flags]))
    report = read(tmp_path / "out")
    assert targets[0] == 1e-6 / NATURAL_SHARE and len(targets) > 1
    allowed = targets[-1] + choices[-1].by_hand
    assert (choices[-1].by_hand > 0) == bool(by_hand)
    assert drawn_line(report, tmp_path / "x.png", monkeypatch) == [pytest.approx(allowed)]
    # What an older report does not hold is not guessed
    del report["choice"]["target_nats_per_token"]
    assert drawn_line(report, tmp_path / "x.png", monkeypatch) == []


def test_a_rotated_source_gives_the_rotated_model(tmp_path):
    save_source(tmp_path)
    source = read_source(str(tmp_path))
    base = rotate(source, seed=0)
    assert torch.equal(base.model.lm_head.weight, model_of(base).lm_head.weight)
    assert not torch.equal(base.model.model.embed_tokens.weight, source.model.model.embed_tokens.weight)


NOT_GREEDY = GenerationConfig(
    do_sample=True,
    temperature=5.0,
    repetition_penalty=1.8,
    no_repeat_ngram_size=1,
    num_beams=3,
    min_new_tokens=3,
    suppress_tokens=list(range(20, 120)),
)


@pytest.mark.parametrize("is_adapted", [False, True], ids=["model", "adapter"])
def test_greedy_is_greedy_whatever_the_checkpoint_says(is_adapted):
    model, tokenizer, prompt, stop = tiny_model(), byte_tokenizer(), [5, 6, 7], 299
    model.generation_config = own = GenerationConfig.from_dict(NOT_GREEDY.to_dict())
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(12):
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
    expected = tokenizer.decode(ids[3:], skip_special_tokens=True) + " ..."
    if is_adapted:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert answer(model, tokenizer, prompt, [stop], 12) == expected
    # And the checkpoint's own settings are there to be saved
    assert model.generation_config is own and own.to_dict() == NOT_GREEDY.to_dict()


def test_sampling_leaves_the_models_own_settings_where_they_were():
    plain, told = tiny_model(), tiny_model()
    told.generation_config = own = GenerationConfig.from_dict(NOT_GREEDY.to_dict())
    texts = [sample_windows(model, byte_tokenizer(), 2, 16, seed=0) for model in (plain, told)]
    assert torch.equal(*texts) and told.generation_config is own
