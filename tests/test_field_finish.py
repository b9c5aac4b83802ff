"""python -m sft, its end: tried before the first step, finished by one command where it fails, one run a folder."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from chat_bases import save_base
from chat_runs import results, weights
from conftest import REPOSITORY
from safetensors.torch import save_file
from saved_models import assert_states_equal
from transformers import PreTrainedModel

from checkpoints.outputs import LOCK_FILE, own_files, strangers
from checkpoints.resume import last_whole
from model_cards.publish import files_to_publish
from sft.chat import Chat
from sft.lock import only_run
from sft.proof import Proof
from sft.trainer import ChatTrainer
from sft.unfinished import finish_command


LORA = {"use_peft": True, "lora_r": 4}


@pytest.fixture
def finish(tmp_path, monkeypatch, capsys):
    """Runs the command that a failed end named, as it was printed."""
    from sft.__main__ import main

    def run(error: str, *flags: str):
        (command,) = re.findall(r"`python -m sft (finish [^`]*)`", error)
        monkeypatch.setattr("sys.argv", ["sft", *command.split(), *flags])
        main()

    return run


def fails_once(monkeypatch, owner, name: str, error: BaseException):
    """The next call of owner.name raises; those after it do what it does."""
    whole = getattr(owner, name)

    def fail(*arguments, **options):
        monkeypatch.setattr(owner, name, whole)
        raise error

    monkeypatch.setattr(owner, name, fail)


def fail_at_the_end(monkeypatch, what: str):
    """Fails once after training: in the save, in the measuring of what was saved, in the card."""
    train = ChatTrainer.train

    def train_then_break(self, *arguments, **options):
        done = train(self, *arguments, **options)
        if what == "disk":
            # The trainer's own save comes first, and succeeds
            whole = ChatTrainer.save_model

            def save(trainer, *places, **others):
                whole(trainer, *places, **others)
                fails_once(monkeypatch, PreTrainedModel, "save_pretrained", OSError(28, "No space left on device"))

            monkeypatch.setattr(ChatTrainer, "save_model", save)
        elif what == "card":
            fails_once(monkeypatch, __import__("sft.__main__").__main__, "save_fine_tuned_card", KeyError("ratio"))
        else:
            fails_once(monkeypatch, Proof, "measure", {"memory": MemoryError(), "stop": KeyboardInterrupt()}[what])
        return done

    monkeypatch.setattr(ChatTrainer, "train", train_then_break)


@pytest.mark.parametrize(
    ("what", "code", "options"),
    [
        ("disk", 2, {}),
        ("card", 70, LORA),
        ("memory", 2, {}),
        ("stop", 130, {"use_peft": True, "merge_adapter": False}),
    ],
    ids=["disk", "card", "memory", "stop"],
)
def test_where_the_end_fails_the_trained_weights_stay_and_the_printed_command_finishes(
    fine_tune, finish, tmp_path, monkeypatch, what, code, options
):
    whole = fine_tune("whole", **options)
    with monkeypatch.context() as broken:
        fail_at_the_end(broken, what)
        error = fine_tune(code=code, **options)
    out = tmp_path / "out"
    assert f"the trained weights stay in {out / '.unfinished'}, and `python -m sft finish {out}`" in error
    assert not (out / "results.json").exists() or what == "card"
    assert "finish" in fine_tune(code=2, **options)
    # No step is trained
    monkeypatch.setattr(ChatTrainer, "train", None)
    finish(error)
    names = {path.relative_to(whole).as_posix() for path in whole.rglob("*")}
    assert {path.relative_to(out).as_posix() for path in out.rglob("*")} == names
    for file in whole.rglob("*.safetensors"):
        assert file.read_bytes() == (out / file.relative_to(whole)).read_bytes()
    for key in ("data", "chat", "summary", "before", "after", "files"):
        assert results(out)[key] == results(whole)[key], key
    assert results(out)["training"]["num_steps"] == results(whole)["training"]["num_steps"]


def test_a_finished_run_whose_leftovers_stay_does_not_send_the_user_to_finish(fine_tune, monkeypatch, tmp_path):
    import sft.__main__

    fails_once(monkeypatch, sft.__main__, "drop_trained", PermissionError(13, "Permission denied"))
    error = fine_tune(code=2)
    assert "Permission denied" in error and "finish" not in error
    assert (tmp_path / "out" / "results.json").is_file()


def test_a_folder_that_stands_where_a_file_is_to_be_is_named_before_training_and_stays(
    fine_tune, monkeypatch, tmp_path
):
    (notes := tmp_path / "out" / "tokenizer.json" / "notes.txt").parent.mkdir(parents=True)
    notes.write_text("mine")
    monkeypatch.setattr(ChatTrainer, "train", None)
    assert "holds a folder tokenizer.json" in fine_tune(code=2, overwrite=True)
    assert notes.read_text() == "mine"


def test_the_command_that_finishes_can_be_typed_as_it_stands():
    assert shlex.split(finish_command(Path("my run")))[-1] == "my run"


def test_a_signal_in_the_last_step_leaves_what_finish_goes_on_from(fine_tune, finish, tmp_path, monkeypatch):
    step = ChatTrainer.training_step

    def interrupted(self, *arguments, **options):
        if self.state.global_step == 1:
            signal.raise_signal(signal.SIGTERM)
        return step(self, *arguments, **options)

    whole = fine_tune("whole")
    monkeypatch.setattr(ChatTrainer, "training_step", interrupted)
    error = fine_tune(code=143)
    assert "stopped after step 2: it was the last" in error and last_whole(tmp_path / "out").name == "checkpoint-2"
    finish(error)
    assert_states_equal(weights(tmp_path / "out"), weights(whole))


def test_finish_takes_other_flags_for_the_end_and_refuses_other_runs(fine_tune, finish, tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as broken:
        fail_at_the_end(broken, "stop")
        error = fine_tune(code=130, **LORA)
    with pytest.raises(SystemExit):
        finish(error, "--seed", "7")
    assert "holds another run: its seed was 42, not 7" in capsys.readouterr().err
    assert (tmp_path / "out" / ".unfinished.json").is_file()
    finish(error, "--merge_adapter", "False")
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert not (tmp_path / "out" / ".unfinished").exists() and not (tmp_path / "out" / ".unfinished.json").exists()


@pytest.mark.parametrize("words", [[], ["--seed"], ["nowhere"]])
def test_there_is_nothing_to_finish_without_trained_weights(monkeypatch, capsys, tmp_path, words):
    from sft.__main__ import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["sft", "finish", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and "finish" in capsys.readouterr().err


def test_a_base_with_a_folder_called_like_a_legal_file_is_trained(fine_tune, base):
    (base / "LICENSES").mkdir()
    (base / "conversion_report.old").mkdir()
    (base / "LICENSE").write_text("mine")
    folder = fine_tune()
    assert (folder / "LICENSE").read_text() == "mine" and not (folder / "LICENSES").exists()
    assert "LICENSE" in results(folder)["files"]


def refused_before_training(fine_tune, monkeypatch, tmp_path, **options) -> str:
    monkeypatch.setattr(ChatTrainer, "train", None)
    error = fine_tune(code=2, **options)
    assert not (tmp_path / "out").exists()
    return error


def test_a_disk_too_small_for_the_end_is_known_before_training(fine_tune, monkeypatch, tmp_path):
    free = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr("sft.rehearsal.shutil.disk_usage", lambda place: free)
    error = refused_before_training(fine_tune, monkeypatch, tmp_path)
    assert "needs 0.00 GB (trained weights, finished model), but 0.00 GB are free" in error


def test_a_tokenizer_that_does_not_load_again_is_known_before_training(fine_tune, monkeypatch, tmp_path):
    save = Chat.save

    def half(self, folder):
        save(self, folder)
        (folder / "tokenizer.json").write_text("{")

    monkeypatch.setattr(Chat, "save", half)
    error = refused_before_training(fine_tune, monkeypatch, tmp_path)
    assert "tokenizer and chat template, once saved, do not load again" in error


def test_a_template_that_says_something_else_after_saving_is_known_before_training(fine_tune, monkeypatch, tmp_path):
    save = Chat.save

    def other(self, folder):
        save(self, folder)
        for file in ("chat_template.jinja", "tokenizer_config.json"):
            text = (folder / file).read_text()
            (folder / file).write_text(text.replace("message", "massage") if file.endswith("jinja") else text)

    monkeypatch.setattr(Chat, "save", other)
    assert "do not load again" in refused_before_training(fine_tune, monkeypatch, tmp_path)


def test_a_report_that_the_card_cannot_be_made_of_is_known_before_training(fine_tune, base, monkeypatch, tmp_path):
    report = {"bhyt_version": "1", "perplexity": {"source": 3}, "source": {"name": "x"}, "kl_nats_per_token": 0.1}
    (base / "conversion_report.json").write_text(json.dumps(report))
    error = refused_before_training(fine_tune, monkeypatch, tmp_path)
    assert "the card of the finished model cannot be made" in error and "ratio" in error


def test_settings_that_cannot_be_saved_are_known_before_training(fine_tune, monkeypatch, tmp_path):
    fails_once(monkeypatch, PreTrainedModel, "save_pretrained", TypeError("not serializable"))
    error = refused_before_training(fine_tune, monkeypatch, tmp_path)
    assert "the finished model's settings and code cannot be saved" in error


def test_a_dtype_in_which_weights_are_infinite_is_refused_and_the_weights_stay(fine_tune, finish, tmp_path):
    base = save_base(tmp_path / "large")
    tensors = weights(base)
    tensors["model.embed_tokens.weight"][5, 5] = 1e6
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    error = fine_tune(base=base, save_dtype="float16", code=1)
    assert "is not finite in the dtype to save it in" in error
    finish(error, "--save_dtype", "float32")
    assert weights(tmp_path / "out")["model.embed_tokens.weight"].isfinite().all()


def test_a_second_run_into_the_same_folder_is_refused_and_touches_nothing(fine_tune, tmp_path):
    out = tmp_path / "out"
    # A lock belongs to an opening of the file, so this is what another process would be
    with only_run(out):
        (out / "checkpoint-1").mkdir()
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        for options in ({}, {"overwrite": True}):
            assert f"output_dir {out} belongs to a run that is under way" in fine_tune(code=2, **options)
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    assert not (out / LOCK_FILE).exists()


def test_a_run_holds_its_folder_while_it_trains_and_no_longer(fine_tune, monkeypatch, tmp_path):
    train, seen = ChatTrainer.train, []

    def look(self, *arguments, **options):
        with pytest.raises(ValueError, match="belongs to a run that is under way"), only_run(tmp_path / "out"):
            pass
        seen.append(LOCK_FILE in [path.name for path in strangers(tmp_path / "out")])
        return train(self, *arguments, **options)

    monkeypatch.setattr(ChatTrainer, "train", look)
    folder = fine_tune()
    assert seen == [False] and not (folder / LOCK_FILE).exists() and LOCK_FILE not in results(folder)["files"]
    (folder / LOCK_FILE).touch()
    assert LOCK_FILE not in [file.name for file in files_to_publish(folder)]


def test_a_lock_dies_with_its_process(fine_tune, tmp_path):
    code = "import os, sys; from pathlib import Path; from sft.lock import only_run\n"
    code += "with only_run(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    subprocess.run([sys.executable, "-c", code, tmp_path / "out"], env=environment)
    assert (tmp_path / "out" / LOCK_FILE).is_file()
    folder = fine_tune()
    assert (folder / "model.safetensors").is_file() and not (folder / LOCK_FILE).exists()


def test_overwrite_replaces_what_runs_left_and_nothing_else(fine_tune, base):
    (base / "LICENSE").write_text("the base's")
    folder = fine_tune(save_strategy="steps", save_steps=1, **LORA)
    mine = ["notes.txt", "runs/a/log", "wandb/b", "tokenizer_notes.txt", "checkpoint-best/x", "modelling.md", "NOTICE"]
    for name in mine:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (base / "LICENSE").unlink()
    assert fine_tune(overwrite=True, seed=3) == folder
    assert all((folder / name).read_text() == name for name in mine)
    assert results(folder)["recipe"]["seed"] == 3
    assert not (folder / "adapter").exists() and not list(folder.glob("checkpoint-[0-9]*"))
    assert not (folder / "LICENSE").exists()
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {*results(folder)["files"], *mine}
    assert {file.as_posix() for file in own_files(folder)} >= {"model.safetensors", "results.json", "config.json"}


@pytest.mark.parametrize(
    "name", ["model-00001-of-00002.safetensors", "consolidated.safetensors", "adapter_config.json"]
)
def test_overwrite_leaves_no_weights_of_others_beside_its_own(fine_tune, tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("another's")
    error = fine_tune(code=2, overwrite=True)
    assert f"holds {name} (1 such files), which no run of this command wrote" in error
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


def test_words_of_a_run_are_enough_to_finish_it_from_anywhere(fine_tune, finish, monkeypatch, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as broken:
        fail_at_the_end(broken, "stop")
        error = fine_tune(code=130, base="base", rows="rows.jsonl")
    monkeypatch.chdir(tmp_path / "elsewhere")
    finish(error)
    assert (tmp_path / "out" / "model.safetensors").is_file()
