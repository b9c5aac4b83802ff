"""An upload: what it takes away, what it leaves, and that nobody's push between is overwritten."""

from pathlib import Path

import pytest
from hub_stub import HubStub
from huggingface_hub import HfApi

from model_cards.publish import _files_there, files_to_publish, publish, stale_files


CARD = "---\nlibrary_name: transformers\nlicense: mit\n---\n\n# Model\n"
OLDER = ("model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json")
OLDER += ("adapter_config.json", "adapter_model.safetensors", "conversion_windows.safetensors")
NOT_OURS = ("pytorch_model.bin", "model-Q4_0.gguf", "consolidated.safetensors", "old/model.safetensors", "notes.txt")
NOT_OURS += ("adapter/adapter_config.json", "checkpoint-1/adapter_model.safetensors", ".gitattributes")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub that this process and its children ask; the repository exists."""
    stub = HubStub()
    stub.created.append({})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("model_cards.publish.HfApi", lambda: HfApi(endpoint=stub.address, token="hf_secret"))
    yield stub
    stub.close()


def folder_of(place, *files):
    place.mkdir()
    for name in files:
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("{}")
    (place / "README.md").write_text(CARD)
    return place


def fill(hub, *names):
    hub.files.update(dict.fromkeys(names, b"old"))


def command(hub, folder, *words, **others):
    return hub.run(folder.parent, "-m", "model_cards.publish", folder.name, "someone/model", *words, **others)


def test_a_whole_model_takes_older_weights_and_adapters_away_and_leaves_everything_else(hub, tmp_path, capsys):
    folder = folder_of(tmp_path / "out", "config.json", "model-00001-of-00001.safetensors")
    fill(hub, *OLDER, *NOT_OURS, "config.json")
    publish(folder, "someone/model")
    kept = {"config.json", "model-00001-of-00001.safetensors", "README.md", *NOT_OURS}
    assert set(hub.files) == kept
    assert hub.files["config.json"] == b"{}" and hub.files["old/model.safetensors"] == b"old"
    assert (
        all(name in capsys.readouterr().out for name in ()) and len([r for r in hub.requests if "/commit/" in r]) == 1
    )


def test_an_adapter_takes_an_older_adapter_away_alone(hub, tmp_path):
    folder = folder_of(tmp_path / "out", "adapter_config.json", "adapter_model.safetensors")
    fill(hub, *OLDER, "adapter_model.bin")
    publish(folder, "someone/model")
    assert set(hub.files) == {*OLDER, "README.md"}


def test_what_holds_no_weights_takes_none_away():
    assert stale_files(OLDER, [Path("config.json"), Path("README.md")]) == []


def test_what_the_upload_holds_is_not_deleted(hub, tmp_path):
    folder = folder_of(tmp_path / "out", "config.json", "model.safetensors", "conversion_windows.npz")
    fill(hub, *OLDER)
    for _ in range(2):
        publish(folder, "someone/model")
        assert set(hub.files) == {"config.json", "model.safetensors", "conversion_windows.npz", "README.md"}


def test_windows_of_an_older_graft_are_not_uploaded_as_a_second_file_of_weights(hub, tmp_path):
    folder = folder_of(tmp_path / "out", "config.json", "model.safetensors", "conversion_windows.safetensors")
    publish(folder, "someone/model")
    assert set(hub.files) == {"config.json", "model.safetensors", "README.md"}


def test_a_push_of_somebody_else_in_between_is_not_overwritten(hub, tmp_path, monkeypatch):
    folder = folder_of(tmp_path / "out", "config.json", "model.safetensors")
    fill(hub, "model-00001-of-00002.safetensors")
    listed = "model_cards.publish._files_there"

    def and_then_somebody_pushes(*arguments):
        found = _files_there(*arguments)
        hub.files["theirs.txt"] = b"new"
        return found

    monkeypatch.setattr(listed, and_then_somebody_pushes)
    with pytest.raises(ValueError, match="somebody else changed the repository meanwhile: try again .HTTP 412"):
        publish(folder, "someone/model")
    assert set(hub.files) == {"model-00001-of-00002.safetensors", "theirs.txt"}
    monkeypatch.setattr(listed, _files_there)
    publish(folder, "someone/model")
    assert "theirs.txt" in hub.files and "model-00001-of-00002.safetensors" not in hub.files


def test_a_branch_is_cleared_of_its_own_older_weights(hub, tmp_path):
    folder = folder_of(tmp_path / "out", "config.json", "model.safetensors")
    fill(hub, "model.safetensors.index.json")
    publish(folder, "someone/model", revision="v2")
    assert set(hub.files) == {"model.safetensors.index.json"}
    assert set(hub.branches["v2"]) == {"config.json", "model.safetensors", "README.md"}


def test_a_dry_run_lists_uploads_and_deletions_and_offline_says_that_it_could_not_look(hub, tmp_path):
    folder = folder_of(tmp_path / "out", "config.json", "model.safetensors")
    fill(hub, *OLDER, *NOT_OURS)
    before = dict(hub.files)
    done = command(hub, folder, "--dry_run")
    assert done.returncode == 0 and hub.files == before, done.stderr
    uploads, _, deletions = done.stdout.partition("would delete 5 files there:")
    assert "model.safetensors" in uploads
    assert deletions.split() == sorted(set(OLDER) - {"model.safetensors"})
    asked = len(hub.requests)
    done = command(hub, folder, "--dry_run", HF_HUB_OFFLINE="1")
    assert done.returncode == 0 and len(hub.requests) == asked
    assert "3 files" in done.stdout and "could not look for older weights" in done.stdout
    hub.created.clear()
    assert "would delete nothing: there is no such repository" in command(hub, folder, "--dry_run").stdout


def test_a_dry_run_refuses_what_an_upload_would_refuse(hub, tmp_path):
    folder = folder_of(tmp_path / "out", "config.json")
    (folder / "README.md").unlink()
    done = command(hub, folder, "--dry_run")
    assert done.returncode == 2 and "has no README.md" in done.stderr and not hub.requests


def test_a_readme_in_a_subfolder_is_not_replaced_by_the_card(hub, tmp_path):
    folder = folder_of(tmp_path / "out", "config.json", "docs/README.md")
    assert len(files_to_publish(folder)) == 3
    publish(folder, "someone/model")
    assert hub.files["docs/README.md"] == b"{}" and b"# Model" in hub.files["README.md"]


def test_the_command_that_goes_on_can_be_typed_as_it_stands(hub, tmp_path):
    folder = folder_of(tmp_path / "my model", "config.json")
    hub.fail("/commit/", 403)
    with pytest.raises(ValueError, match=r"publish '.*/my model' someone/model --license mit` goes on"):
        publish(folder, "someone/model", licence="mit")


def test_a_card_on_the_hub_that_cannot_be_kept_is_named_and_nothing_is_uploaded(hub, tmp_path):
    folder = folder_of(tmp_path / "out", "config.json", "model.safetensors")
    hub.files["README.md"] = theirs = b"---\nlicense: [\n---\n"
    with pytest.raises(
        ValueError, match="someone/model: its README.md on the Hub would be kept, but .*: mend it there"
    ):
        publish(folder, "someone/model")
    assert hub.files == {"README.md": theirs}
