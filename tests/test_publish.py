"""Uploads: what goes to the Hub and what never does, what is loaded from there, and what each refusal says."""

import json

import pytest
import torch
from chat_bases import save_base
from chat_runs import words_of, write_rows
from hub_stub import HubStub
from test_graft import QUICK, save_source

from model_cards.publish import files_to_publish, plan
from model_cards.render import BEGIN, END
from modeling_bhyt import BHyTLlamaForCausalLM


CARD = f"---\nlibrary_name: transformers\nlicense: mit\ntags:\n- bhyt\n---\n\n{BEGIN}\n# Model\n{END}\n"
LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline
tokenizer = AutoTokenizer.from_pretrained("someone/model", trust_remote_code=True, revision=sys.argv[1])
model = AutoModelForCausalLM.from_pretrained("someone/model", trust_remote_code=True, revision=sys.argv[1])
assert "bhyt" not in {name.split(".")[0] for name in sys.modules} and "modeling_bhyt" not in sys.modules
torch.save(model(torch.arange(3, 20)[None]).logits, sys.argv[2])
text = pipeline("text-generation", model=model, tokenizer=tokenizer)("ab", max_new_tokens=2)
print(type(model).__name__, len(text))
"""


@pytest.fixture
def hub():
    stub = HubStub()
    yield stub
    stub.close()


@pytest.fixture
def finished(tmp_path):
    """A small finished model with a card, and all that training leaves beside it."""
    folder = save_base(tmp_path / "out")
    (folder / "README.md").write_text(CARD)
    return folder


def publish(hub, folder, *words):
    return hub.run(folder.parent, "-m", "model_cards.publish", folder.name, "someone/model", *words)


def the_line(done) -> str:
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2 and "Traceback" not in done.stderr
    return line


def test_a_graft_is_pushed_whole_and_without_a_secret(tmp_path, hub):
    save_source(tmp_path / "source")
    words = [
        "-m",
        "conversion",
        "graft",
        "source",
        "out",
        *QUICK,
        "--license",
        "mit",
        "--push_to_hub",
        "someone/model",
        "--private",
    ]
    done = hub.run(tmp_path, *words, "--dry_run")
    assert done.returncode == 0 and "would upload the finished folder to someone/model" in done.stdout
    assert not hub.created
    done = hub.run(tmp_path, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    assert hub.created[0]["name"] == "model" and hub.created[0]["visibility"] == "private"
    expected = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert hub.files == expected and {"modeling_bhyt.py", "README.md", "conversion_report.json"} <= set(expected)
    assert not any(b"hf_secret" in content for content in hub.files.values())
    assert "hf_secret" not in done.stdout + done.stderr


@pytest.mark.parametrize("revision", ["main", "v2"])
def test_what_was_pushed_is_loaded_by_name_in_a_fresh_process_with_the_same_logits(tmp_path, hub, finished, revision):
    done = publish(hub, finished, *(["--revision", revision] if revision != "main" else []))
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(hub.branches) == {"main", revision} and (revision == "main" or not hub.files)
    loaded = hub.run(tmp_path, "-P", "-c", LOAD, revision, "logits.pt", PYTHONPATH="")
    assert loaded.returncode == 0, loaded.stderr[-2000:]
    with torch.no_grad():
        expected = BHyTLlamaForCausalLM.from_pretrained(finished)(torch.arange(3, 20)[None]).logits
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)
    assert loaded.stdout.split()[0] == "BHyTLlamaForCausalLM"


def test_what_training_leaves_is_not_pushed(finished, hub):
    expected = {path.name for path in finished.iterdir()}
    left = "training_args.bin optimizer.pt scheduler.pt rng_state.pth run.json before.json trainer_state.json .x/y".split()
    left += ["checkpoint-3/model.safetensors", "adapter/adapter_model.safetensors", "global_step3/a.pt"]
    for name in left:
        (finished / name).parent.mkdir(exist_ok=True)
        (finished / name).write_text("x")
    assert {str(file) for file in files_to_publish(finished)} == expected
    done = publish(hub, finished)
    assert done.returncode == 0 and set(hub.files) == expected, done.stderr[-2000:]


def test_a_dry_run_lists_files_and_sizes_and_changes_nothing(finished, hub):
    done = publish(hub, finished, "--dry_run", "--revision", "v2")
    assert done.returncode == 0 and all(request.startswith("GET") for request in hub.requests)
    assert "someone/model, v2 (public if it has to be made)" in done.stdout
    size = (finished / "model.safetensors").stat().st_size
    assert f"{size / 1e3:.1f} kB  model.safetensors" in done.stdout and "config.json" in done.stdout


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/api/repos/create", 401, "does not know this token: set HF_TOKEN"),
        ("/api/repos/create", 403, "may not write there"),
        ("/commit/", 403, "may not write there"),
        ("/commit/", 409, "changed the repository meanwhile"),
        ("/commit/", 413, "too large for the Hub: save smaller shards"),
        ("/preupload/", 413, "too large for the Hub: save smaller shards"),
        ("/commit/", 0, "the connection to the Hub failed"),
        ("/api/validate-yaml", 400, "refuses its front matter"),
    ],
)
def test_a_refusal_is_one_line_and_the_upload_can_be_repeated(finished, hub, path, status, said):
    hub.fail(path, status, times=20 if status == 0 else 1)
    line = the_line(publish(hub, finished))
    assert said in line and not hub.files
    if status != 400:
        assert "out is ready here, and `python -m model_cards.publish out someone/model` goes on" in line
    hub.fail(path, 0, times=0)
    for _ in range(2):
        assert publish(hub, finished).returncode == 0
        assert set(hub.files) == {path.name for path in finished.iterdir()}


def test_no_hub_and_no_token_are_one_line(finished, hub):
    offline = hub.run(finished.parent, "-m", "model_cards.publish", "out", "someone/model", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in the_line(offline)
    nobody = hub.run(finished.parent, "-m", "model_cards.publish", "out", "someone/model", HF_TOKEN="")
    hub.fail("/api/repos/create", 401)
    assert nobody.returncode == 0 or "set HF_TOKEN" in the_line(nobody)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("notes.txt", "my token is hf_" + "a" * 34, "notes.txt holds a token"),
        ("tokenizer.json", '{"x": "hf_' + "B1" * 17 + '"}', "tokenizer.json holds a token"),
        ("adapter_config.json", '{"base_model_name_or_path": "/"}', "names a folder of this machine"),
    ],
)
def test_secrets_and_folders_of_this_machine_do_not_go_up(finished, file, content, said):
    (finished / file).write_text(content)
    with pytest.raises(ValueError, match=said):
        files_to_publish(finished)


def test_a_file_above_the_limit_of_the_hub_is_refused_before_the_upload(finished):
    with (finished / "model-2.safetensors").open("wb") as file:
        file.truncate(50_000_000_001)
    with pytest.raises(ValueError, match="more than the Hub's 50 GB: save smaller shards"):
        plan(finished, "someone/model")


@pytest.mark.parametrize("name", ["", "a b/c", "a/b/c", "someone/--x"])
def test_a_name_that_is_none_is_refused(finished, name):
    with pytest.raises(ValueError, match="give name/model"):
        plan(finished, name)


def test_a_folder_without_a_card_is_refused_before_the_hub_is_asked(finished, hub):
    (finished / "README.md").unlink()
    assert "out has no README.md" in the_line(publish(hub, finished)) and not hub.requests


def test_a_misspelt_flag_is_one_line(finished, hub):
    done = publish(hub, finished, "--privat")
    assert the_line(done) == "error: unrecognized arguments: --privat" == done.stderr.strip() and not hub.requests


def test_a_folder_without_a_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint"):
        plan(tmp_path, "someone/model")


def test_what_a_user_wrote_on_the_hub_is_kept(finished, hub):
    assert publish(hub, finished).returncode == 0
    theirs = (
        hub.files["README.md"].decode().replace("---\n\n", "language: de\n---\n\nMy own words.\n\n", 1)
        + "\nAnd more.\n"
    )
    hub.files["README.md"] = theirs.encode()
    (finished / "README.md").write_text(CARD.replace("# Model", "# Newer"))
    assert publish(hub, finished).returncode == 0
    card = hub.files["README.md"].decode()
    assert card.index("My own words.") < card.index(BEGIN) < card.index("# Newer") < card.index("And more.")
    assert "language: de" in card and "# Model" not in card


def test_a_fine_tune_is_pushed_and_loaded_by_name(tmp_path, hub):
    base = save_base(tmp_path / "base", kind="chatml")
    rows = write_rows(tmp_path / "rows.jsonl", [["Hi", "Hello"]] * 4)
    words = words_of(base, rows, tmp_path / "tuned", save_strategy="epoch", refresh_constants_every=1, use_peft=True)
    words += [
        "--license",
        "mit",
        "--push_to_hub",
        "--hub_model_id",
        "someone/model",
        "--hub_private_repo",
        "True",
        "--hub_revision",
        "v1",
    ]
    dry = hub.run(tmp_path, "-m", "sft", *words, "--dry_run")
    assert dry.returncode == 0 and not hub.created and not (tmp_path / "tuned").exists(), dry.stderr[-2000:]
    assert "would upload the finished folder to someone/model, v1 (private if" in dry.stdout
    done = hub.run(tmp_path, "-m", "sft", *words)
    assert done.returncode == 0, done.stderr[-2000:]
    assert hub.created[0]["visibility"] == "private" and not hub.files
    pushed = hub.branches["v1"]
    assert {"model.safetensors", "results.json", "training_log.csv", "modeling_bhyt.py", "chat_template.jinja"} <= set(
        pushed
    )
    private = ("checkpoint", "optimizer", "training_args", "run.json", "before.json", "adapter", ".git")
    assert not [name for name in pushed if name.startswith(private)]
    for name, content in pushed.items():
        assert b"hf_secret" not in content and str(tmp_path).encode() not in content, name
    loaded = hub.run(tmp_path, "-P", "-c", LOAD, "v1", "logits.pt", PYTHONPATH="")
    assert loaded.returncode == 0, loaded.stderr[-2000:]
    with torch.no_grad():
        expected = BHyTLlamaForCausalLM.from_pretrained(tmp_path / "tuned")(torch.arange(3, 20)[None]).logits
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


def test_a_failed_push_of_a_graft_leaves_the_folder(tmp_path, hub):
    save_source(tmp_path / "source")
    hub.fail("/api/repos/create", 403)
    words = [
        "-m",
        "conversion",
        "graft",
        "source",
        "out",
        *QUICK,
        "--license",
        "mit",
        "--push_to_hub",
        "someone/model",
        "--revision",
        "v1",
    ]
    line = the_line(hub.run(tmp_path, *words))
    assert "out is ready here" in line and "--revision v1" in line
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "bhyt_llama"
