"""python -m sft given what it cannot take, or stopped half-way: one line, nothing half-written, nothing of the user's lost."""

import json
import re
from pathlib import Path

import pytest
import torch
from chat_bases import MARKED, save_base
from chat_runs import results, weights
from datasets.exceptions import DatasetNotFoundError
from transformers import AutoTokenizer

from sft.arguments import parse
from sft.norm_callbacks import NormStatistics
from sft.proof import Proof


def test_what_stands_in_the_output_folder_is_replaced_only_when_told(fine_tune, tmp_path):
    folder = fine_tune()
    (folder / "notes.txt").write_text("mine")
    assert "is not empty" in fine_tune(code=2)
    fine_tune(overwrite=True, seed=3)
    assert results(folder)["recipe"]["seed"] == 3 and (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"data": "nowhere.jsonl"}, "no file at nowhere.jsonl"),
        ({"hub_token": "x"}, "hub_token is not taken here: .* HF_TOKEN"),
        ({"packing": True, "packing_strategy": "wrapped"}, "cuts conversations in two"),
        ({"push_to_hub": True}, "give --hub_model_id"),
        ({"model_name_or_path": "x.gguf"}, "is a GGUF file"),
        ({"resume_from_checkpoint": "last"}, "holds no checkpoint to resume from"),
        ({"max_answer_tokens": -1}, "max_answer_tokens is -1"),
        ({"perplexity_data": ["a/x.txt", "b/x.txt"]}, "names two texts x.txt"),
        ({"perplexity_data": "a/x.txt"}, "a/x.txt: the text holds 12 windows of 512 tokens, 40 are needed"),
        ({"figures_before": "other.json"}, "other.json holds figures of another base"),
        ({"save_dtype": "bf16"}, "save_dtype"),
        ({"data_config": "german"}, "rows.jsonl is a file, which has no configuration 'german'"),
        ({"eval_config": "german"}, "eval_config is 'german', but there is no eval_data"),
        ({"max_length": -1}, "max_length is -1"),
        ({"model_name_or_path": "./absent/folder"}, "no folder at ./absent/folder"),
        ({"load_in_4bit": True, "use_peft": True}, "bitsandbytes"),
        ({"optim": "adamw_bnb_8bit"}, "bitsandbytes"),
        ({"report_to": "tensorboard"}, "the trainer cannot be made: .*[tT]ensor[bB]oard"),
        ({"attn_implementation": "flash_attention_2"}, "[fF]lash"),
        (
            {"use_peft": True, "merge_adapter": False, "push_to_hub": True, "hub_model_id": "a/b"},
            "is a folder of this",
        ),
        ({"learning_rat": 1}, "unrecognized arguments: --learning_rat 1|learning_rat"),
        ({"figures_before": "nowhere.json"}, "nowhere.json"),
        ({"perplexity_data": "nowhere.txt"}, "no text file at nowhere.txt"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_trained(fine_tune, tmp_path, monkeypatch, options, said):
    monkeypatch.chdir(tmp_path)
    for name in ("a/x.txt", "b/x.txt"):
        Path(name).parent.mkdir()
        Path(name).write_text("some words " * 600, encoding="utf-8")
    Path("other.json").write_text(json.dumps({"of": "something else"}))
    assert re.search(said, fine_tune(code=2, **options))
    assert not (tmp_path / "out").exists()


def test_an_unknown_key_of_a_recipe_is_refused(fine_tune, tmp_path):
    (tmp_path / "recipe.yaml").write_text("max_lenght: 4\n")
    assert "max_lenght" in fine_tune(code=2, config=tmp_path / "recipe.yaml")


@pytest.mark.parametrize("key", ["save_dtype", "dtype"])
def test_a_choice_is_checked_in_a_recipe_too(fine_tune, tmp_path, key):
    (tmp_path / "recipe.yaml").write_text(f"{key}: bf16\n")
    assert f"{key} is 'bf16': give one of auto, float32" in fine_tune(code=2, config=tmp_path / "recipe.yaml")
    assert not (tmp_path / "out").exists()


def test_one_text_in_a_recipe_is_a_list_of_one(fine_tune, tmp_path):
    (tmp_path / "recipe.yaml").write_text(f"questions: Why?\nperplexity_data: {tmp_path / 'text.txt'}\n")
    (tmp_path / "text.txt").write_text("some words " * 30, encoding="utf-8")
    windows = {"num_perplexity_windows": 1, "perplexity_window_length": 64, "max_answer_tokens": 2}
    found = results(fine_tune(config=tmp_path / "recipe.yaml", **windows))["before"]
    assert [answer["question"] for answer in found["answers"]] == ["Why?"] and list(found["perplexity"]) == [
        "text.txt"
    ]


@pytest.mark.parametrize("place", ["out", "out/base"])
def test_a_base_in_the_output_folder_is_not_replaced(fine_tune, tmp_path, place):
    base = save_base(tmp_path / place)
    kept = weights(base)
    assert "holds the base" in fine_tune(code=2, base=base, overwrite=True)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in weights(base).items())


def test_what_belongs_to_a_folder_that_stands_is_not_lost_by_bad_input(fine_tune, tmp_path):
    folder = fine_tune()
    (tmp_path / "other.json").write_text(json.dumps({"of": "something else"}))
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert "another base" in fine_tune(code=2, overwrite=True, figures_before=tmp_path / "other.json")
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_figures_of_another_model_in_the_same_place_are_not_taken(fine_tune, base, tmp_path):
    options = {"max_answer_tokens": 2, "questions": "Why?"}
    known = fine_tune("first", **options) / "before.json"
    fine_tune("second", figures_before=known, **options)
    save_base(base, seed=9)
    assert "figures of another base" in fine_tune("third", code=2, figures_before=known, **options)


def test_a_base_whose_card_or_report_cannot_be_read_is_trained_all_the_same(fine_tune, base):
    (base / "README.md").write_bytes(b"---\nlicense: [\n---\nna\xefve")
    (base / "conversion_report.json").write_text("{broken")
    found = results(fine_tune())
    assert found["base"]["license"] is None
    assert any("conversion_report.json cannot be read" in said for _, said in found["summary"])


def test_a_row_that_the_template_refuses_is_left_out(fine_tune, tmp_path):
    refusing = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + MARKED
    base = save_base(tmp_path / "start")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = refusing
    tokenizer.save_pretrained(base)
    roles = [["system", "user", "assistant"], ["user", "assistant"]]
    rows = [{"messages": [{"role": role, "content": "x"} for role in some]} for some in roles]
    (tmp_path / "mixed.json").write_text(json.dumps(rows))
    data = results(fine_tune(base=base, rows=tmp_path / "mixed.json"))["data"]["data"]
    assert data["bad"] == [[0, "the chat template refuses it: no system role"]] and data["num_kept"] == 1


def test_the_last_checkpoint_is_the_last_whole_one(fine_tune, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 2, "overwrite": False}
    folder = fine_tune(**options)
    whole = weights(folder)
    (folder / "checkpoint-99").mkdir()
    resumed = fine_tune(resume_from_checkpoint="last", **options)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in weights(resumed).items())


def test_a_resumed_runs_mean_loss_is_that_of_the_whole_run(fine_tune):
    options = {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 2}
    whole = fine_tune("whole", **options)
    part = fine_tune("part", **options)
    (last,) = part.glob("checkpoint-4")
    (last / "trainer_state.json").unlink()
    resumed = fine_tune("part", resume_from_checkpoint="last", **options)
    assert results(resumed)["training"]["mean_loss"] == pytest.approx(results(whole)["training"]["mean_loss"])


@pytest.mark.parametrize("changed", ["warmup_steps", "max_grad_norm", "adam_beta1"])
def test_a_run_goes_on_with_the_settings_that_it_began_with(fine_tune, changed):
    fine_tune(save_strategy="steps", save_steps=1)
    options = {"resume_from_checkpoint": "last", "save_strategy": "steps", "save_steps": 1, changed: 0.5}
    assert f"its {changed} was" in fine_tune(code=2, **options)


@pytest.mark.parametrize("options", [{}, {"use_peft": True, "merge_adapter": False}], ids=["full", "adapter"])
def test_weights_that_are_not_finite_are_saved_nowhere(fine_tune, tmp_path, monkeypatch, options):
    end = NormStatistics.on_step_end

    def spoil(self, args, state, control, **others):
        end(self, args, state, control, **others)
        if state.global_step == state.max_steps:
            weight = next(p for p in self.trainer.model.parameters() if p.requires_grad)
            weight.data.view(-1)[0] = torch.inf

    monkeypatch.setattr(NormStatistics, "on_step_end", spoil)
    error = fine_tune(code=1, save_strategy="steps", save_steps=1, **options)
    assert "is not finite after step 2" in error
    out = tmp_path / "out"
    assert (out / "checkpoint-1").is_dir() and not list(out.glob("checkpoint-2/*.safetensors"))
    assert not list(out.glob("*.safetensors")) and not list(out.glob(".unfinished/*"))


def test_a_run_stopped_before_its_first_step_is_begun_again_by_the_same_command(fine_tune, monkeypatch):
    measure = Proof.measure

    def interrupted(self, model):
        raise KeyboardInterrupt

    monkeypatch.setattr(Proof, "measure", interrupted)
    assert "there is no checkpoint yet; the same command begins again" in fine_tune(code=130)
    monkeypatch.setattr(Proof, "measure", measure)
    assert (fine_tune() / "model.safetensors").is_file()


def test_a_stopped_upload_says_what_goes_on_with_it(fine_tune, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("sft.__main__.publish", interrupted)
    error = fine_tune(code=130, license="mit", push_to_hub=True, hub_model_id="someone/model")
    assert "out is ready; `python -m model_cards.publish" in error and "someone/model` uploads it" in error


def test_a_checkpoint_of_a_run_holds_the_chat_template(fine_tune):
    folder = fine_tune(save_strategy="steps", save_steps=1)
    checkpoint = AutoTokenizer.from_pretrained(folder / "checkpoint-1")
    assert checkpoint.chat_template == AutoTokenizer.from_pretrained(folder).chat_template


def test_a_gated_data_set_is_one_line(fine_tune, tmp_path, monkeypatch):
    def refuse(*place, **options):
        raise DatasetNotFoundError("Dataset 'GAIR/lima' is a gated dataset on the Hub.")

    monkeypatch.setattr("sft.data.load_dataset", refuse)
    assert "accept its terms at https://huggingface.co/datasets/GAIR/lima" in fine_tune(code=2, rows="GAIR/lima")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_without_padding_still_teaches_every_end(fine_tune, base, batches):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(base)
    folder = fine_tune()
    stop = AutoTokenizer.from_pretrained(folder).eos_token_id
    # Every third of the eight conversations has two replies
    assert sum((batch["labels"] == stop).sum().item() for batch in batches) == 8 + 3
    padding = [batch["labels"][batch["attention_mask"] == 0] for batch in batches]
    assert any(len(labels) for labels in padding) and all((labels == -100).all() for labels in padding)


@pytest.mark.parametrize("readme", [b"---\nlicense: [\n---\n", b"na\xefve"])
def test_a_card_that_could_not_be_kept_is_named_before_the_work(fine_tune, readme):
    folder = fine_tune()
    (folder / "README.md").write_bytes(readme)
    whole = (folder / "model.safetensors").stat().st_mtime_ns
    assert "README.md would be kept in the new card, but" in fine_tune(code=2, overwrite=True)
    assert (folder / "model.safetensors").stat().st_mtime_ns == whole


def test_a_tilde_means_home_in_a_recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    recipe = {"model_name_or_path": "~/base", "data": "~/rows.jsonl[0:3]", "output_dir": "~/out"}
    recipe |= {"perplexity_data": ["~/a.txt", "b.txt"], "figures_before": "~/before.json"}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    chat, training, model = parse(["--config", str(tmp_path / "recipe.yaml")])
    assert model.model_name_or_path == f"{tmp_path}/base" and training.output_dir == f"{tmp_path}/out"
    assert chat.data == f"{tmp_path}/rows.jsonl[0:3]" and chat.figures_before == f"{tmp_path}/before.json"
    assert chat.perplexity_data == [f"{tmp_path}/a.txt", "b.txt"]
