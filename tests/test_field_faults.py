"""Whatever file operation fails, a command succeeds whole, or leaves what was there and says one line.

A sample runs with the other tests; `python -m pytest tests/test_field_faults.py --all-faults` tries every operation in turn.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from chat_bases import save_base
from chat_runs import ROWS, words_of, write_rows
from conftest import REPOSITORY
from faults import KINDS, End, Faults, Scenario, Trial, aside, run
from hub_stub import HubStub
from huggingface_hub import constants
from test_graft import QUICK, save_source


SAMPLED = ["--window_length", "16", "--num_report_tokens", "64"]
HEALING = ["--heal_tokens", "128", "--heal_text", str(REPOSITORY / "LICENSE"), "--save_steps", "1"]
CARD = "---\nlicense: mit\n---\n\n# What a user wrote\n"


def _conversion():
    from conversion.__main__ import main

    return main


def _run(folder: Path, main: Callable, *words: str):
    end = run(Scenario("preparation", lambda folder: None, main, list(words)), folder, Faults(str(folder)))
    assert end.code == 0, end.errors


def _prepare_source(folder: Path):
    save_source(folder / "source", num_hidden_layers=1)
    (folder / "source" / "LICENSE").write_text("a licence")
    (folder / "source" / "README.md").write_text(CARD)


def _prepare_graft(folder: Path):
    """A source, and an earlier graft of it at OUTPUT, with a card that a user has written in."""
    _prepare_source(folder)
    _run(folder, _conversion(), "graft", "source", "out", *QUICK)
    with (folder / "out" / "README.md").open("a") as card:
        card.write("\nA user's own lines.\n")


def _prepare_model(folder: Path):
    """A source, its graft, and at OUTPUT an earlier result of the same kind."""
    _prepare_graft(folder)
    shutil.copytree(folder / "out", folder / "graft")


def _graft() -> Scenario:
    """Over an earlier graft, in several weight files, measured on text of the source's own."""
    words = ["graft", "source", "out", *QUICK, *SAMPLED, "--calibration_text", str(REPOSITORY / "LICENSE")]
    words += ["--report_text", str(REPOSITORY / "CONTRIBUTING.md")]
    return Scenario("graft", _prepare_graft, _conversion(), [*words, "--overwrite", "--max_shard_size", "100kB"])


def _new_graft() -> Scenario:
    """Where nothing is yet, healed at once."""
    words = ["graft", "source", "new/out", *QUICK, *HEALING, "--num_report_tokens", "96", "--force"]
    return Scenario("new graft", _prepare_source, _conversion(), words, ("new", "new/out.checkpoints*"))


def _heal() -> Scenario:
    words = ["heal", "graft", "out", "--teacher", "source", *SAMPLED, *HEALING, "--overwrite", "--force"]
    return Scenario("heal", _prepare_model, _conversion(), words, ("out.checkpoints*",))


def _export() -> Scenario:
    words = ["export", "graft", "out", *SAMPLED, "--num_calibration_tokens", "64", "--overwrite", "--force"]
    return Scenario("export", _prepare_model, _conversion(), words)


def _sft_main():
    from sft.__main__ import main

    return main


def _prepare_chat(folder: Path):
    save_base(folder / "base", num_hidden_layers=1)
    write_rows(folder / "rows.jsonl", ROWS)


def _sft(**options) -> Scenario:
    """A training with checkpoints; after a failure the printed command, its last checkpoint or itself ends it."""
    options = {"save_strategy": "steps", "save_steps": 1, "questions": "a?", **options}
    words = words_of(Path("base"), Path("rows.jsonl"), Path("out"), **options)

    def go_on(end: End) -> list[str]:
        if "sft finish" in end.lines[-1]:
            return ["finish", "out"]
        is_whole = any(
            name.startswith("out/checkpoint-") and name.endswith("/trainer_state.json") for name in end.files
        )
        return [*words, *(["--resume_from_checkpoint", "last"] if is_whole else ["--overwrite", "true"])]

    return Scenario("sft", _prepare_chat, _sft_main(), words, ("out", "out/*"), grad=True, go_on=go_on)


def _lora() -> Scenario:
    return _sft(use_peft=True, lora_r=2, save_strategy="no")


def _prepare_upload(folder: Path):
    """A finished model, and a repository that holds an older one."""
    save_base(folder / "out", num_hidden_layers=1)
    (folder / "out" / "README.md").write_text(CARD)
    (folder / "hub").mkdir()
    (folder / "hub" / "README.md").write_text(CARD.replace("user", "reader"))
    (folder / "hub" / "adapter_model.safetensors").write_bytes(b"older weights")


def _publish() -> Scenario:
    """Uploads `out` to a repository that holds what stands in `hub`, which then holds what the repository does."""
    from model_cards.publish import main

    def upload():
        with aside():
            hub = HubStub()
            hub.created.append({})
            hub.files.update({path.name: path.read_bytes() for path in Path("hub").iterdir()})
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(constants, "ENDPOINT", hub.address)
                template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
                patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
                patch.setattr(constants, "HF_HUB_OFFLINE", False)
                patch.setattr(constants, "HF_HUB_CACHE", str(Path("cache").absolute()))
                patch.setenv("HF_TOKEN", "hf_secret")
                main()
        finally:
            hub.close()
            with aside():
                shutil.rmtree("hub")
                Path("hub").mkdir()
                for name, content in hub.files.items():
                    (Path("hub") / name).write_bytes(content)

    return Scenario("publish", _prepare_upload, upload, ["out", "someone/model"], others=("cache", "cache/*"))


SCENARIOS = {"graft": _graft, "new graft": _new_graft, "heal": _heal, "export": _export}
SCENARIOS |= {"sft": _sft, "sft with LoRA": _lora, "publish": _publish}


def _points(trial: Trial, all_of_them: bool) -> list[tuple[str, int]]:
    """(kind, operation) of every point; or of a few, among them where a folder takes another's place and where staging goes."""
    points = [(kind, at) for kind in KINDS for at in range(trial.operations(kind))]
    if all_of_them:
        return points
    seen = trial.whole.faults.seen
    renames = [("denied", at) for at, what in enumerate(seen) if what.startswith("os.rename") and "/" not in what]
    removals = [
        ("denied", at) for at, what in enumerate(seen) if what.startswith("os.remove") and "/." in f"/{what[10:]}"
    ]
    few = 2 if trial.scenario.go_on else 4
    return points[:: max(1, len(points) // few)] + renames[-1:] + removals[:1]


@pytest.mark.parametrize("name", SCENARIOS)
def test_whatever_file_operation_fails_a_command_is_whole_or_leaves_all_as_it_was(name, tmp_path, request, capsys):
    trial = Trial(SCENARIOS[name](), tmp_path)
    points = _points(trial, request.config.getoption("--all-faults"))
    wrong = [problem for kind, at in points if (problem := trial.wrong(kind, at))]
    with capsys.disabled():
        print(f"\n{name}: {len(points)} faults", end="")
    assert not wrong, f"{len(wrong)} of {len(points)}:\n" + "\n".join(wrong)


def test_a_disk_that_is_full_in_the_middle_of_a_file_is_one_line(tmp_path, request):
    all_of_them = request.config.getoption("--all-faults")
    wrong = []
    for name in [*SCENARIOS.keys() - {"publish"}] if all_of_them else ["graft", "sft"]:
        trial = Trial(SCENARIOS[name](), tmp_path / name)
        sizes = trial.sizes() if all_of_them else trial.sizes()[-1:]
        wrong += [f"{name}: {problem}" for size in sizes if (problem := trial.wrong_below(size))]
    assert not wrong, "\n".join(wrong)
