"""Uploads: what goes to the Hub, and what never does."""

import os
import subprocess
import sys

import pytest
from conftest import REPOSITORY
from hub_stub import HubStub
from test_graft import QUICK, save_source


@pytest.fixture
def hub():
    stub = HubStub()
    yield stub
    stub.close()


def convert(hub, folder, *words):
    """In a process of its own: the Hub's address is read when huggingface_hub is imported."""
    env = {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "hf_secret",
        "HF_HUB_DISABLE_XET": "1",
    }
    return subprocess.run(
        [sys.executable, "-m", "conversion", *words], cwd=folder, env=env, capture_output=True, text=True
    )


def test_a_graft_is_pushed_whole_and_without_a_secret(tmp_path, hub):
    save_source(tmp_path / "source")
    words = ["graft", "source", "out", *QUICK, "--push_to_hub", "someone/model", "--private"]
    done = convert(hub, tmp_path, *words, "--dry_run")
    assert done.returncode == 0 and "would upload the folder to someone/model" in done.stdout and not hub.created
    done = convert(hub, tmp_path, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    assert hub.created[0]["name"] == "model" and hub.created[0]["visibility"] == "private"
    expected = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.files == expected and {"modeling_bhyt.py", "README.md", "conversion_report.json"} <= set(expected)
    assert not any(b"hf_secret" in content for content in hub.files.values())
    assert "hf_secret" not in done.stdout + done.stderr


def test_what_training_leaves_is_not_pushed(tmp_path, hub):
    code = "import sys; from model_cards.publish import publish; from pathlib import Path; publish(Path(sys.argv[1]), 'someone/model', False)"
    (tmp_path / "out" / "checkpoint-3").mkdir(parents=True)
    for name in (
        "README.md",
        "model.safetensors",
        "training_args.bin",
        "optimizer.pt",
        "checkpoint-3/model.safetensors",
    ):
        (tmp_path / "out" / name).write_text("---\nlicense: apache-2.0\n---\n")
    env = {
        **os.environ,
        "HF_ENDPOINT": hub.address,
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "x",
        "PYTHONPATH": str(REPOSITORY),
    }
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(hub.files) == {"README.md", "model.safetensors"}


def test_a_refusal_of_the_hub_is_one_line_and_the_folder_stays(tmp_path):
    hub = HubStub(refuse=True)
    save_source(tmp_path / "source")
    done = convert(hub, tmp_path, "graft", "source", "out", *QUICK, "--push_to_hub", "someone/model")
    hub.close()
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2 and len(errors) == 1 and "out is ready here" in errors[0], done.stderr[-2000:]
    assert (tmp_path / "out" / "model.safetensors").is_file()
