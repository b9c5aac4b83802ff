"""Who imports whom, what travels with a checkpoint, what a wheel holds, and whether README's words still run."""

import ast
import importlib.util
import re
import subprocess
import sys
import zipfile

import pytest
from byte_tokenizer import byte_tokenizer
from chat_runs import write_rows
from conftest import REPOSITORY, tiny_llama


MAY_IMPORT = {
    "modeling_bhyt": set(),
    "checkpoints": set(),
    "evaluation": {"modeling_bhyt", "checkpoints"},
    "model_cards": {"checkpoints"},
    "conversion": {"modeling_bhyt", "checkpoints", "evaluation", "model_cards"},
    "sft": {"modeling_bhyt", "checkpoints", "evaluation", "model_cards"},
}


def imports_of(file) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_run_one_way(room):
    for file in (REPOSITORY / room).rglob("*.py"):
        assert imports_of(file) & set(MAY_IMPORT) <= MAY_IMPORT[room] | {room}, file


def test_files_that_travel_import_torch_transformers_and_siblings_alone():
    """And by the one form of import that transformers follows when it copies code into a checkpoint."""
    allowed = {"torch", "transformers", "huggingface_hub"} | set(sys.stdlib_module_names)
    for file in (REPOSITORY / "modeling_bhyt").glob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert imports_of(file) <= allowed, file
        assert not re.search(r"^\s*from\s+\.+\s+import|^\s*from\s+\.\S*\.\S+\s+import", text, re.M), file
        # Postponed annotations would switch the configuration's type checks off
        assert "from __future__ import annotations" not in text, file
    assert imports_of(REPOSITORY / "modeling_bhyt" / "normalization_bhyt.py") <= {"collections", "torch"}


def test_wheel_holds_the_model_alone(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(REPOSITORY)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("bhyt-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"modeling_bhyt", "bhyt"}
    assert {"modeling_bhyt/modeling_bhyt.py", "modeling_bhyt/normalization_bhyt.py"} <= set(names)


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.S)


def test_readme_snippets_run_in_their_order(tmp_path):
    """Convert, load and fine-tune as printed, with a tiny source and a few rows where README names them on the Hub."""
    source = tmp_path / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
    tiny_llama(max_position_embeddings=1024).save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    load, fine_tune = snippets("python")
    (convert,) = (snippet for snippet in snippets("bash") if "conversion graft" in snippet)
    (after,) = (snippet for snippet in snippets("bash") if "conversion heal" in snippet)
    (tune,) = (snippet for snippet in snippets("bash") if "python -m sft" in snippet)
    write_rows(tmp_path / "rows.jsonl", [["Hi", "Hello"]] * 4)
    rows = "--data rows.jsonl --eval_data rows.jsonl --num_train_epochs 1 --use_cpu True --bf16 False"
    tune = tune.replace("sft/recipes", f"{REPOSITORY}/sft/recipes").replace("\n", f" {rows}\n")
    shell = convert + tune + after.replace("SOURCE", "HuggingFaceTB/SmolLM2-135M-Instruct")
    lines = [line.replace("python ", f"{sys.executable} ", 1) for line in shell.splitlines()]
    lines.append(f"{sys.executable} -c '{load.replace('your-name/smollm2-bhyt', 'smollm2-bhyt')}'")
    # The machine may have no accelerator: README says how then
    on_cpu = fine_tune.replace("trust_remote_code=True", "trust_remote_code=True, use_cpu=True, bf16=False")
    lines.append(f"{sys.executable} -c '{on_cpu}'")
    done = subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "smollm2-bhyt-sft" / "modeling_bhyt.py").is_file()
    assert (tmp_path / "smollm2-lima" / "training_log.png").is_file()
    assert (tmp_path / "smollm2-healed" / "modeling_bhyt.py").is_file()
    assert '"model_type": "llama"' in (tmp_path / "smollm2-plain" / "config.json").read_text()


def test_a_transformers_that_is_too_old_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr("transformers.__version__", "5.3.0")
    file = REPOSITORY / "modeling_bhyt" / "configuration_bhyt.py"
    spec = importlib.util.spec_from_file_location("old_configuration", file)
    with pytest.raises(ImportError, match="bhyt needs transformers >= 5.4, but 5.3.0 is installed: pip install"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
