"""python -m sft, whole: what the model is given, what is saved, how it stops and goes on."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from chat_bases import save_base
from chat_runs import ROWS, logged, results, weights, words_of, write_rows
from conftest import REPOSITORY, run_without_package
from safetensors.torch import load_file, save_file
from saved_models import assert_states_equal
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

from modeling_bhyt import BHyTLlamaForCausalLM
from sft.trainer import ChatTrainer


@pytest.mark.parametrize("plain", [False, True], ids=["bhyt", "llama"])
def test_a_run_leaves_a_checkpoint_that_a_fresh_process_loads_alone(fine_tune, tmp_path, plain):
    base = save_base(tmp_path / "start", plain=plain)
    folder = fine_tune(base=base, save_strategy="steps", save_steps=1)
    model = (LlamaForCausalLM if plain else BHyTLlamaForCausalLM).from_pretrained(folder)
    ids = torch.arange(3, 20)[None]
    code = (
        "import sys, torch\nfrom transformers import AutoModelForCausalLM\n"
        "m = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype=torch.float32)\n"
        "print(m(torch.arange(3, 20)[None]).logits.sum().item())"
    )
    for place in folder, folder / "checkpoint-1", folder / "checkpoint-2":
        with torch.no_grad():
            expected = type(model).from_pretrained(place)(ids).logits.sum().item()
        assert float(run_without_package(code, tmp_path, place)) == pytest.approx(expected, rel=1e-5)
    assert not (folder / "training_args.bin").exists() and not (folder / ".finished").exists()
    changed = {name for name, tensor in weights(folder).items() if not torch.equal(tensor, weights(base)[name])}
    constants = {name for name in weights(base) if "variance_" in name}
    assert changed == weights(base).keys() - constants


def test_the_model_learns_to_answer_and_to_stop_and_every_setting_names_the_stop(fine_tune, tmp_path):
    rows = write_rows(tmp_path / "one.jsonl", [["Hi", "Hello"]])
    base = save_base(tmp_path / "start", kind="chatml")
    folder = fine_tune(base=base, rows=rows, max_steps=60, warmup_steps=5)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    reply = model.generate(**prompt)[0, prompt["input_ids"].shape[1] :].tolist()
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.decode(reply) == "Hello<|im_end|>"
    settings = GenerationConfig.from_pretrained(folder)
    assert tokenizer.eos_token_id == stop == settings.eos_token_id[0] == model.config.eos_token_id[0]
    assert tokenizer.pad_token_id == settings.pad_token_id == model.config.pad_token_id


def test_before_and_after_are_measured_and_written_down(fine_tune, tmp_path, rows):
    text = tmp_path / "text.txt"
    text.write_text("some words that were not trained on. " * 40)
    folder = fine_tune(
        eval_data=rows,
        perplexity_data=text,
        num_perplexity_windows=2,
        perplexity_window_length=64,
        max_answer_tokens=4,
    )
    found = results(folder)
    for figures in found["before"], found["after"]:
        assert math.isfinite(figures["perplexity"]["text.txt"]["perplexity"]) and len(figures["answers"]) == 3
    assert found["after"]["replies"]["loss"] < found["before"]["replies"]["loss"]
    assert found["data"]["data"]["num_kept"] == 8 and found["recipe"]["learning_rate"] == 1e-2
    assert found["base"]["name"] == "base" and str(tmp_path) not in json.dumps(found)
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "| perplexity, text.txt |" in card and "| text.txt | 2 of 64 tokens |" in card
    assert found["before"]["perplexity"]["text.txt"]["protocol"]["num_left_over_tokens"] > 0
    assert (folder / "training_log.csv").read_text().startswith("step,epoch,") and (
        folder / "training_log.png"
    ).is_file()


def test_first_evaluation_equals_the_loss_of_the_trainer(fine_tune, rows):
    folder = fine_tune(
        eval_data=rows,
        eval_strategy="steps",
        eval_steps=1,
        max_steps=1,
        learning_rate=1e-9,
        save_strategy="steps",
        save_steps=1,
    )
    assert logged(folder, "eval_loss")[0] == pytest.approx(results(folder)["before"]["replies"]["loss"], rel=2e-2)


LORA = {"use_peft": True, "lora_r": 4, "lora_dropout": 0, "train_norms": True}
EVERY_STEP = {"save_strategy": "steps", "save_steps": 1}
ONE_STEP = {"optim": "sgd", "max_grad_norm": 0, "warmup_steps": 0, "max_steps": 1}


@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "lora"])
def test_recomputed_blocks_take_the_same_step(fine_tune, recwarn, base, options):
    options = {**ONE_STEP, "learning_rate": 1.0, **options}
    plain = fine_tune("plain", **options)
    for reentrant in (False, True):
        recompute = {"gradient_checkpointing": True}
        recompute["gradient_checkpointing_kwargs"] = json.dumps({"use_reentrant": reentrant})
        folder = fine_tune(f"recomputed {reentrant}", **options, **recompute)
        torch.testing.assert_close(weights(folder), weights(plain), rtol=0, atol=1e-5)
    moved = [name for name, tensor in weights(plain).items() if not torch.equal(tensor, weights(base)[name])]
    assert any("norm" in name for name in moved) and any("_proj" in name for name in moved)
    assert not [warning for warning in recwarn if "requires_grad" in str(warning.message)]


@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("norm_type", ["bhyt", "bhyt_star", "dyt", "lns"])
def test_norms_are_never_decayed(fine_tune, tmp_path, monkeypatch, norm_type, options):
    decayed = {}
    step = ChatTrainer.training_step

    def watch(self, *arguments, **others):
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for group in self.optimizer.param_groups:
            decayed.update((names[id(parameter)], group["weight_decay"]) for parameter in group["params"])
        return step(self, *arguments, **others)

    monkeypatch.setattr(ChatTrainer, "training_step", watch)
    start = save_base(tmp_path / "start", norm_type=norm_type)
    # A step of no length but for the decay: 1e-2 x 1 a step would show
    fine_tune(base=start, weight_decay=1.0, max_steps=1, **options)
    assert {name for name, decay in decayed.items() if "norm" in name and decay} == set()
    assert {name for name, decay in decayed.items() if "_proj" in name and decay}
    assert sum("norm" in name for name in decayed) >= 6


@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
def test_rows_of_one_step_give_the_same_weights_however_they_are_accumulated(fine_tune, tmp_path, lora):
    rows = write_rows(tmp_path / "uneven.jsonl", [["Q", "a" * count] for count in (2, 4, 7, 12)])
    shapes = [{"per_device_train_batch_size": 4 // steps, "gradient_accumulation_steps": steps} for steps in (1, 2, 4)]
    runs = [
        fine_tune(
            f"out-{number}",
            rows=rows,
            save_strategy="steps",
            save_steps=1,
            **ONE_STEP,
            **lora,
            **shape,
        )
        for number, shape in enumerate(shapes)
    ]
    for folder in runs[1:]:
        torch.testing.assert_close(weights(folder), weights(runs[0]), rtol=0, atol=1e-6)
        assert logged(folder, "loss") == pytest.approx(logged(runs[0], "loss"), abs=1e-4)


@pytest.mark.parametrize("packing", [False, True])
def test_batch_handed_to_the_model_supervises_replies_and_their_ends_alone(fine_tune, batches, packing):
    options = {"packing": True, "max_length": 128} if packing else {}
    folder = fine_tune(**options)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    supervised = [label for batch in batches for label in batch["labels"].flatten().tolist() if label != -100]
    replies = tokenizer.decode(supervised).split("<eos>")
    assert replies.pop() == "" and sorted(replies) == sorted(reply for row in ROWS for reply in row[1::2])


def test_rows_that_max_length_empties_or_cuts_are_counted_and_spoil_nothing(fine_tune, tmp_path):
    long = [["q" * 200, "abc"]] * 4
    cut = [["Q", "a" * 100]] * 2
    short = [["Q", "abc"]] * 2
    folder = fine_tune(rows=write_rows(tmp_path / "long.jsonl", long + cut + short), max_length=64, **EVERY_STEP)
    found = results(folder)["data"]["data"]
    counts = [found[name] for name in ("num_rows", "num_kept", "num_without_reply", "num_cut", "num_without_end")]
    assert counts == [8, 4, 4, 2, 2]
    assert all(0 < loss < math.inf for loss in logged(folder, "loss"))
    assert all(tensor.isfinite().all() for tensor in weights(folder).values())
    error = fine_tune("none", rows=write_rows(tmp_path / "none.jsonl", long), max_length=64, code=2)
    assert "max_length = 64" in error and not (tmp_path / "none" / "run.json").exists()


def test_any_text_is_trained_on_in_any_locale(base, tmp_path):
    text = "Use </s> or <eos> to end \u2014 na\u00efve \U0001f600\u2028    indented"
    rows = write_rows(tmp_path / "any.jsonl", [[text, f"  {text}\n"]] * 2)
    words = words_of(base, rows, tmp_path / "out", max_answer_tokens=4, questions=[text, "b"])
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    environment |= {"PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": ""}
    done = subprocess.run([sys.executable, "-m", "sft", *words], env=environment, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = results(tmp_path / "out")
    # Bytes are tokens here: the trimmed reply and one end of turn
    assert found["data"]["data"]["num_supervised"] == 2 * (len(text.encode()) + 1)
    assert found["after"]["answers"][0]["question"] == text
    assert text.split("\u2028")[0].replace("<", "&lt;") in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_an_adapter_trains_the_projections_and_not_the_head_and_is_merged(fine_tune, base):
    folder = fine_tune(use_peft=True, lora_r=4)
    stored = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert stored and all(".self_attn." in name or ".mlp." in name for name in stored)
    moved = {name for name, tensor in weights(folder).items() if not torch.equal(tensor, weights(base)[name])}
    assert moved == {name for name in weights(base) if "_proj." in name}
    assert not (folder / "adapter_model.safetensors").exists()
    trained = dict(results(folder)["summary"])["trained"]
    assert "LoRA" in trained and "norm" not in trained and "head" not in trained


def test_an_adapter_with_norms_changes_gains_and_lambda_and_no_constant(fine_tune, base):
    folder = fine_tune(use_peft=True, lora_r=4, train_norms=True, weight_decay=1.0)
    stored = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert sum(name.endswith((".lam", "layernorm.weight")) for name in stored) == 12
    moved = {name for name, tensor in weights(folder).items() if not torch.equal(tensor, weights(base)[name])}
    norms = {name for name in weights(base) if "layernorm.weight" in name or name.endswith(".lam")}
    assert moved == norms | {name for name in weights(base) if "_proj." in name}


def test_an_adapter_can_be_saved_alone(fine_tune, base):
    from peft import PeftModel

    folder = fine_tune(use_peft=True, lora_r=4, merge_adapter=False)
    merged = fine_tune("merged", use_peft=True, lora_r=4)
    assert not (folder / "model.safetensors").exists()
    adapted = PeftModel.from_pretrained(BHyTLlamaForCausalLM.from_pretrained(base), folder).merge_and_unload()
    torch.testing.assert_close(dict(adapted.state_dict()), weights(merged), rtol=0, atol=1e-6)


def test_a_stopped_run_goes_on_to_the_same_weights(fine_tune, monkeypatch, tmp_path):
    options = {"per_device_train_batch_size": 1, "num_train_epochs": 1, "save_strategy": "steps", "save_steps": 100}
    whole = fine_tune("whole", **options)
    step, handler = ChatTrainer.training_step, signal.getsignal(signal.SIGINT)

    def interrupted(self, *arguments, **others):
        if self.state.global_step == 3:
            signal.raise_signal(signal.SIGINT)
        return step(self, *arguments, **others)

    monkeypatch.setattr(ChatTrainer, "training_step", interrupted)
    error = fine_tune("stopped", code=130, **options)
    assert "stopped after step 4: go on with --resume_from_checkpoint last" in error
    stopped = tmp_path / "stopped"
    assert (stopped / "checkpoint-4").is_dir() and not (stopped / "model.safetensors").exists()
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.setattr(ChatTrainer, "training_step", step)
    assert "is not empty" in fine_tune("stopped", code=2, **options)
    assert "its seed was 42, not 7" in fine_tune("stopped", code=2, resume_from_checkpoint="last", seed=7, **options)
    refreshed = {"resume_from_checkpoint": "last", "refresh_constants_every": 2, **options}
    assert "its refresh_constants_every was 0, not 2" in fine_tune("stopped", code=2, **refreshed)
    resumed = fine_tune("stopped", resume_from_checkpoint="last", **options)
    assert_states_equal(weights(resumed), weights(whole))


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_a_run_that_is_no_longer_finite_stops_before_the_step_and_saves_nothing_broken(
    fine_tune, monkeypatch, tmp_path, what
):
    step = ChatTrainer.compute_loss

    class Break(torch.autograd.Function):
        @staticmethod
        def forward(context, loss):
            return loss.clone()

        @staticmethod
        def backward(context, gradient):
            return gradient * math.nan

    def broken(self, *arguments, **options):
        loss = step(self, *arguments, **options)
        if self.state.global_step < 1:
            return loss
        return loss * math.inf if what == "loss" else Break.apply(loss)

    monkeypatch.setattr(ChatTrainer, "compute_loss", broken)
    error = fine_tune(code=1, save_strategy="steps", save_steps=1)
    assert f"{'the loss became inf' if what == 'loss' else 'a gradient is not finite'} in step 2" in error
    assert "smaller learning_rate" in error
    assert [path.name for path in tmp_path.glob("out/checkpoint-*")] == ["checkpoint-1"]
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "out" / "checkpoint-1").values())


def test_an_invalid_generation_config_is_mended_at_the_start(fine_tune, base):
    file = base / "generation_config.json"
    file.write_text(json.dumps({"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}))
    folder = fine_tune()
    assert any("unset temperature = 0.6, top_p = 0.9" in said for _, said in results(folder)["summary"])
    GenerationConfig.from_pretrained(folder).validate(strict=True)


def test_a_padding_id_without_a_row_is_exchanged_and_the_last_token_learns(fine_tune, base, tmp_path):
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"pad_token_id": -1}))
    folder = fine_tune()
    assert any("pad_token_id was -1" in said for _, said in results(folder)["summary"])
    assert json.loads((folder / "config.json").read_text())["pad_token_id"] == 0


def test_a_token_without_a_row_is_refused_before_training(fine_tune, base):
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([f"<new {number}>" for number in range(60)])
    tokenizer.save_pretrained(base)
    assert "the embeddings have 300 rows" in fine_tune(code=2)


def _with_norms_in_fp32(folder: Path) -> Path:
    mixed = {name: tensor.float() if "norm" in name else tensor for name, tensor in weights(folder).items()}
    save_file(mixed, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_finished_model_has_the_dtype_of_its_base_and_trains_in_fp32(fine_tune, tmp_path, stored):
    base = save_base(tmp_path / "start")
    BHyTLlamaForCausalLM.from_pretrained(base, dtype=getattr(torch, stored)).save_pretrained(base)
    folder = fine_tune(base=base)
    assert {tensor.dtype for tensor in weights(folder).values()} == {getattr(torch, stored)}
    assert "trained weights float32; computed in float32" in dict(results(folder)["summary"])["precision"]
    mixed = fine_tune("mixed", base=_with_norms_in_fp32(base))
    assert {name: tensor.dtype for name, tensor in weights(mixed).items()} == {
        name: tensor.dtype for name, tensor in weights(base).items()
    }
    other = fine_tune("other", base=base, save_dtype="float16")
    assert {tensor.dtype for tensor in weights(other).values()} == {torch.float16}


def test_small_steps_move_every_gain_in_fp32_and_bf16_weights_are_warned_of(fine_tune, base, tmp_path):
    model = BHyTLlamaForCausalLM.from_pretrained(base)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and "variance_" not in name:
                parameter.fill_(1.0)
    model.save_pretrained(base)
    options = {
        "learning_rate": 1e-5,
        "max_steps": 50,
        "per_device_train_batch_size": 8,
        "lr_scheduler_type": "constant",
    }
    folder = fine_tune(**options)
    gains = [name for name in weights(base) if "norm" in name and "variance_" not in name]
    assert not any(torch.equal(weights(folder)[name], weights(base)[name]) for name in gains)
    assert "WARNING" not in dict(results(folder)["summary"])
    stuck = fine_tune("stuck", dtype="bfloat16", save_dtype="float32", **options)
    assert any(torch.equal(weights(stuck)[name], weights(base)[name]) for name in gains)
    assert "steps smaller than its spacing" in dict(results(stuck)["summary"])["WARNING"]


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(fine_tune, tmp_path, capsys):
    folder = fine_tune(dry_run=True)
    assert not folder.exists() and "8 rows in, 8 kept" in capsys.readouterr().out.replace("\n", " ")


def test_recipes_name_options_that_exist(monkeypatch):
    from conftest import REPOSITORY

    from sft.arguments import parse

    for recipe in (REPOSITORY / "sft" / "recipes").glob("*.yaml"):
        arguments, training, model = parse(
            [
                "--config",
                str(recipe),
                "--model_name_or_path",
                "x",
                "--output_dir",
                "y",
                "--use_cpu",
                "True",
                "--bf16",
                "False",
            ]
        )
        assert (
            arguments.data.startswith("GAIR/lima") and training.learning_rate == 1e-5 and training.weight_decay == 0.1
        )
