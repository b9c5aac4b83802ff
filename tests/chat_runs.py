"""Runs of python -m sft on tiny models, as fixtures, and how to read what they leave."""

import json
from pathlib import Path

import pytest
import torch
from chat_bases import save_base
from safetensors.torch import load_file


ROWS = [[f"Q{number}", f"A{number}"] + (["more", "ok"] if number % 3 == 0 else []) for number in range(8)]
QUICK = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "max_answer_tokens": 0, "logging_steps": 1}
QUICK |= {"per_device_train_batch_size": 4, "learning_rate": 1e-2, "num_train_epochs": 1, "save_strategy": "no"}


@pytest.fixture
def base(tmp_path) -> Path:
    return save_base(tmp_path / "base")


@pytest.fixture
def rows(tmp_path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", ROWS)


def write_rows(file: Path, rows) -> Path:
    file.write_text("\n".join(json.dumps({"conversations": row}) for row in rows), encoding="utf-8")
    return file


def words_of(base: Path, rows: Path, output: Path, **options) -> list[str]:
    options = {"model_name_or_path": base, "data": rows, "output_dir": output, **QUICK, **options}
    words = []
    for name, value in options.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


@pytest.fixture
def fine_tune(base, rows, tmp_path, monkeypatch, capsys):
    """Runs the command in this process; the folder it made, or its exit code and its one line."""

    from sft.__main__ import main

    def run(output: str = "out", base: Path = base, rows: Path = rows, code: int = 0, **options):
        folder = tmp_path / output
        monkeypatch.setattr("sys.argv", ["sft", *words_of(base, rows, folder, **options)])
        if not code:
            main()
            return folder
        with pytest.raises(SystemExit) as stopped:
            main()
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert stopped.value.code == code and error.startswith("error: "), error
        return error

    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def results(folder: Path) -> dict:
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))


def logged(folder: Path, key: str) -> list[float]:
    (last,) = sorted(folder.glob("checkpoint-*/trainer_state.json"))[-1:]
    return [entry[key] for entry in json.loads(last.read_text())["log_history"] if key in entry]


@pytest.fixture
def batches(monkeypatch) -> list[dict[str, torch.Tensor]]:
    """Every batch that a model is trained on in this test, as it is handed to it."""
    from sft.trainer import ChatTrainer

    seen = []
    step = ChatTrainer.training_step

    def watch(self, model, inputs, *arguments, **options):
        seen.append({name: tensor.clone() for name, tensor in inputs.items() if isinstance(tensor, torch.Tensor)})
        return step(self, model, inputs, *arguments, **options)

    monkeypatch.setattr(ChatTrainer, "training_step", watch)
    return seen
