"""Whose files lie in an OUTPUT: ours are replaced, anybody else's are never lost, whenever and however a command ends."""

import json
import os
import signal
import sys

import kills
import pytest
import yaml
from test_graft import QUICK, save_source
from test_heal import HEAL_TEXT

from checkpoints.command_line import deferred_signals
from checkpoints.outputs import names_of_files, own_files, refuse_strangers, strangers
from conversion import __main__ as command
from conversion import delivery
from conversion.arguments import ExportArguments, GraftArguments, VerifyArguments, parse


def write(folder, *names, **records):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    for name, record in records.items():
        (folder / f"{name}.json").write_text(json.dumps(record))


def test_a_folder_without_a_record_of_ours_is_all_strangers_though_its_names_are_usual(tmp_path):
    write(tmp_path, "config.json", "model.safetensors", "README.md", "LICENSE", ".cache/x", results={"mine": 1})
    assert own_files(tmp_path) is None
    assert [str(path) for path in strangers(tmp_path)] == ["config.json", "model.safetensors", "results.json"]
    assert strangers(tmp_path / "absent") == []


def test_strangers_are_what_the_record_does_not_list_and_folders_are_counted_once(tmp_path):
    write(
        tmp_path,
        "config.json",
        "a/one",
        "a/two",
        ".git/x",
        ".git/y",
        "tokenizer.json",
        ".gitattributes",
        "USE_POLICY.md",
    )
    write(
        tmp_path, conversion_report={"bhyt_version": "0", "files": ["config.json", "a/one", "conversion_report.json"]}
    )
    assert [str(path) for path in strangers(tmp_path)] == [".git", "a/two", "tokenizer.json"]
    with pytest.raises(ValueError, match=r"OUTPUT .* holds \.git/, a/two, tokenizer.json \(3 in all\)"):
        refuse_strangers(tmp_path, "OUTPUT")
    assert names_of_files(tmp_path / "a") == ["one", "two"]


def test_a_folder_with_an_older_record_is_known_by_names(tmp_path):
    write(tmp_path, "config.json", "model-00001-of-00002.safetensors", "modeling_bhyt.py", "LICENSE", "model.gguf")
    write(tmp_path, conversion_report={"bhyt_version": "0"})
    assert [str(path) for path in strangers(tmp_path)] == ["model.gguf"]


@pytest.fixture
def conversion(monkeypatch, capsys, tmp_path):
    """Exit code and error output of `python -m conversion COMMAND`, run in this process beside a tiny source."""
    save_source(tmp_path / "source")
    monkeypatch.chdir(tmp_path)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["conversion", *map(str, words)])
        with pytest.raises(SystemExit) as end:
            command.main()
        return end.value.code, capsys.readouterr().err

    return run


@pytest.fixture
def graft(conversion):
    return lambda output="out", *flags: conversion("graft", "source", output, *QUICK, *flags)


@pytest.fixture
def work(monkeypatch):
    """How often a model was begun to be written: 0 where a command was refused before the work."""
    begun = []
    original = command.save_whole
    monkeypatch.setattr(command, "save_whole", lambda arguments: begun.append(arguments) or original(arguments))
    return begun


def contents(folder) -> dict:
    return {name: (folder / name).read_bytes() for name in names_of_files(folder)}


def beside(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_overwrite_refuses_a_folder_with_files_of_somebody_else_before_the_work(graft, tmp_path, work):
    assert graft()[0] == 0 and len(work) == 1
    write(tmp_path / "out", "notes.txt", ".git/HEAD", ".git/config", "other/model.safetensors", "model.gguf")
    before = contents(tmp_path / "out")
    for flags in (["--overwrite"], ["--overwrite", "--dry_run"], []):
        code, error = graft("out", *flags)
        assert code == 2 and "holds .git/, model.gguf, notes.txt (4 in all)" in error and error.count("error:") == 1
    assert contents(tmp_path / "out") == before and len(work) == 1


@pytest.mark.parametrize("words", [["export", "graft", "out"], ["heal", "graft", "out", "--teacher", "source"]])
def test_export_and_heal_refuse_another_model_too(words, graft, conversion, tmp_path):
    graft("graft")
    save_source(tmp_path / "out")
    before = contents(tmp_path / "out")
    text = [*QUICK[:2], "--report_text", QUICK[7]] + (
        HEAL_TEXT if words[0] == "heal" else ["--calibration_text", QUICK[7]]
    )
    code, error = conversion(*words, *text, "--overwrite")
    assert code == 2 and "out holds chat_template.jinja, config.json, " in error
    assert contents(tmp_path / "out") == before


def test_the_report_names_every_file_and_all_of_them_are_replaced(graft, tmp_path):
    save_source(tmp_path / "source")
    write(tmp_path / "source", "LICENSE")
    graft()
    report = json.loads((tmp_path / "out" / "conversion_report.json").read_text())
    assert report["files"] == names_of_files(tmp_path / "out")
    assert {"config.json", "README.md", "LICENSE", "conversion_report.png", "modeling_bhyt.py"} < set(report["files"])
    (tmp_path / "source" / "LICENSE").unlink()
    assert graft("out", "--overwrite", "--max_shard_size", "50KB")[0] == 0
    files = names_of_files(tmp_path / "out")
    assert "model.safetensors" not in files and "model.safetensors.index.json" in files and "LICENSE" not in files


def test_what_git_the_hub_and_a_user_left_is_kept_and_caches_are_no_strangers(graft, tmp_path):
    graft()
    write(tmp_path / "out", ".gitattributes", ".cache/huggingface/x", "__pycache__/x.pyc", ".DS_Store", "LICENSE.md")
    card = tmp_path / "out" / "README.md"
    card.write_text(card.read_text() + "\nwhat I found\n")
    assert graft("out", "--overwrite")[0] == 0
    assert (tmp_path / "out" / ".gitattributes").is_file() and (tmp_path / "out" / "LICENSE.md").is_file()
    assert "what I found" in card.read_text() and not (tmp_path / "out" / ".cache").exists()
    assert "LICENSE.md" not in json.loads((tmp_path / "out" / "conversion_report.json").read_text())["files"]
    # Kept again, and again
    assert graft("out", "--overwrite")[0] == 0 and (tmp_path / "out" / "LICENSE.md").is_file()


def test_files_that_appear_during_the_work_are_kept(graft, tmp_path, monkeypatch):
    graft()
    original = command.save_report

    def save(*arguments):
        original(*arguments)
        write(tmp_path / "out", "notes.txt", "run/log")

    monkeypatch.setattr(command, "save_report", save)
    assert graft("out", "--overwrite")[0] == 0
    assert (tmp_path / "out" / "notes.txt").is_file() and (tmp_path / "out" / "run" / "log").is_file()


def test_an_empty_folder_is_free_and_keeps_its_rights(graft, tmp_path):
    (tmp_path / "out").mkdir(mode=0o750)
    assert graft()[0] == 0 and (tmp_path / "out" / "config.json").is_file()
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


def test_the_target_of_a_link_is_replaced_and_the_link_stays(graft, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk" / "model")
    for flags in ([], ["--overwrite"]):
        assert graft("out", *flags)[0] == 0
        assert (tmp_path / "out").is_symlink() and (tmp_path / "disk" / "model" / "config.json").is_file()
        assert beside(tmp_path / "disk") == ["model"] and beside(tmp_path) == ["disk", "out", "source"]


def test_places_that_cannot_be_replaced_are_refused_before_the_work(graft, tmp_path, monkeypatch, work):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: str(path) in ("/", str(tmp_path / "here")))
    places = {
        "/": "hold each other",
        "here": "is a mount point",
        "file": "is no folder",
        "file/out": "file is not a folder",
        "loop": "is no folder",
        "source": "hold each other",
        "source/in": "hold each other",
        "..": "hold each other",
        "x" * 250: "File name too long",
    }
    for place, reason in places.items():
        code, error = graft(place, "--overwrite")
        assert code == 2 and reason in error and error.count("error:") == 1, (place, error)
    monkeypatch.undo()
    assert not work and beside(tmp_path) == ["file", "here", "loop", "source"]


def test_the_folder_one_stands_in_is_refused_before_the_work(graft, tmp_path, monkeypatch, work):
    graft()
    monkeypatch.chdir(tmp_path / "out")
    before = contents(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "moved")
    (tmp_path / "moved").rename(tmp_path / "out")
    save_source(tmp_path / "elsewhere")
    words = ["graft", tmp_path / "elsewhere", ".", *QUICK, "--overwrite"]
    monkeypatch.setattr(sys, "argv", ["conversion", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 2 and contents(tmp_path / "out") == before and len(work) == 1


def test_a_folder_that_may_not_be_moved_is_known_before_the_work(graft, tmp_path, monkeypatch, work):
    graft()
    original = type(tmp_path).rename

    def refuse(self, target):
        if self.name == "out":
            raise PermissionError(1, "Operation not permitted")
        return original(self, target)

    monkeypatch.setattr(type(tmp_path), "rename", refuse)
    code, error = graft("out", "--overwrite")
    assert code == 2 and "cannot be made: Operation not permitted" in error and len(work) == 1


def test_a_tilde_means_home_in_flags_and_in_yaml(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    values = {
        "source": "~/s",
        "output": "~/o",
        "calibration_text": "~/t[1:2]",
        "report_text": "~/r",
        "heal_text": "~/h",
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(values))
    arguments = parse(GraftArguments, ["--config", "~/r.yaml"])
    assert {name: getattr(arguments, name) for name in values} == {
        name: value.replace("~", str(tmp_path)) for name, value in values.items()
    }
    assert parse(ExportArguments, ["--model=~/m", "--output=o/"]).model == str(tmp_path / "m")
    assert parse(VerifyArguments, ["~/m", "--source", "~/s"]).source == str(tmp_path / "s")
    with pytest.raises(SystemExit):
        parse(GraftArguments, ["~nobody-of-that-name/s", "o"])


def test_a_folder_called_like_ours_beside_output_survives(graft, tmp_path):
    write(tmp_path / "out.checkpoints", "thesis.txt", "checkpoint-5/model.safetensors")
    before = contents(tmp_path / "out.checkpoints")
    assert graft()[0] == 0 and graft("out/", "--overwrite")[0] == 0
    assert contents(tmp_path / "out.checkpoints") == before
    code, error = graft("out", "--overwrite", *HEAL_TEXT)
    assert code == 2 and "checkpoint-5 is no finished checkpoint" in error
    (tmp_path / "out.checkpoints" / "checkpoint-5").rename(tmp_path / "mine")
    assert graft("out", "--overwrite", *HEAL_TEXT, "--force")[0] == 0
    assert beside(tmp_path / "out.checkpoints") == ["thesis.txt"]


def send(number, then=None):
    def act(*arguments, **keywords):
        os.kill(os.getpid(), number)
        return then(*arguments, **keywords) if then else None

    return act


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGTERM], ids=lambda number: number.name)
def test_a_signal_during_the_work_leaves_the_earlier_folder_and_no_staging(number, graft, tmp_path, monkeypatch):
    graft()
    before = contents(tmp_path / "out")
    former = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def stop(*arguments):
        # A second one during the cleanup does not break it
        monkeypatch.setattr(delivery.shutil, "rmtree", send(number, delivery.shutil.rmtree))
        os.kill(os.getpid(), number)

    monkeypatch.setattr(command, "save_report", stop)
    code, error = graft("new/deep", "--overwrite")
    assert code == 128 + number and "interrupted: nothing was written" in error
    assert contents(tmp_path / "out") == before and beside(tmp_path) == ["out", "source"]
    for each, handler in former.items():
        signal.signal(each, handler)


def test_a_signal_that_was_ignored_stays_ignored(graft, tmp_path, monkeypatch):
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        monkeypatch.setattr(command, "save_report", send(signal.SIGHUP, command.save_report))
        monkeypatch.setattr(delivery, "_change_places", send(signal.SIGHUP, delivery._change_places))
        assert graft()[0] == 0 and (tmp_path / "out" / "config.json").is_file()
    finally:
        signal.signal(signal.SIGHUP, former)


def test_a_signal_between_the_two_moves_waits_and_the_end_says_what_stands(graft, tmp_path, monkeypatch):
    graft()
    before = (tmp_path / "out" / "config.json").stat().st_ino
    original = type(tmp_path).rename

    def rename(self, target):
        if (tmp_path / "source").is_dir() and self.name in ("out", "new"):
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, target)

    monkeypatch.setattr(delivery, "_try_replacing", lambda *arguments: None)
    monkeypatch.setattr(type(tmp_path), "rename", rename)
    code, error = graft("out", "--overwrite", "--push_to_hub", "someone/model", "--license", "mit")
    assert code == 143 and "out is ready; `python -m model_cards.publish out someone/model` uploads it" in error
    assert (tmp_path / "out" / "config.json").stat().st_ino != before and beside(tmp_path) == ["out", "source"]


def test_a_deferred_signal_comes_after_the_block():
    heard = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with deferred_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            assert not heard
        assert heard == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, former)


def test_a_move_that_fails_puts_the_earlier_folder_back(graft, tmp_path, monkeypatch):
    graft()
    before = contents(tmp_path / "out")
    original = type(tmp_path).rename

    def rename(self, target):
        if self.name == delivery.NEW:
            raise OSError(28, "No space left on device")
        return original(self, target)

    monkeypatch.setattr(type(tmp_path), "rename", rename)
    code, error = graft("out", "--overwrite")
    assert code == 2 and "No space left" in error
    assert contents(tmp_path / "out") == before and beside(tmp_path) == ["out", "source"]


def test_what_a_killed_run_left_is_named_and_an_earlier_folder_put_back(graft, tmp_path):
    graft()
    before = contents(tmp_path / "out")
    # Killed during the work; killed between the two moves
    write(tmp_path / ".out.abcdefgh" / "new", "model.safetensors")
    write(tmp_path / ".out.ijklmno_" / "new", "model.safetensors")
    (tmp_path / "out").rename(tmp_path / ".out.ijklmno_" / "old")
    # A user's own
    write(tmp_path / ".out.notes", "x")
    write(tmp_path / ".out.abcdef12", "x")
    code, error = graft("out", "--dry_run")
    assert code == 0 and "out would be put back from" in error and not (tmp_path / "out").exists()
    code, error = graft("out")
    assert code == 2 and "out was put back from" in error and "OUTPUT out exists" in error
    assert all(f"{tmp_path / name} is left of a run" in error for name in (".out.abcdefgh", ".out.ijklmno_"))
    assert contents(tmp_path / "out") == before and error.count("is left of a run") == 2


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_a_run_killed_at_either_move_loses_no_folder(moves, tmp_path):
    kills.prepare(tmp_path)
    earlier = kills.remember(tmp_path)
    process = kills.graft_in_a_fork(tmp_path, "--overwrite", before=lambda: kills.kill_after(moves))
    assert kills.wait_for(process) == -signal.SIGKILL
    found = kills.check_what_stands(tmp_path, earlier)
    assert found == ["before them", "between the moves", "after them"][moves] + ", staging left"


def test_runs_killed_at_random_moments_lose_no_folder(tmp_path):
    """Three of them; `python tests/kills.py` kills twenty."""
    kills.prepare(tmp_path)
    assert sum(kills.random_kills(tmp_path, 3).values()) == 3
