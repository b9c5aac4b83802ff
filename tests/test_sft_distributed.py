"""The whole command on two processes (FSDP2 over gloo) does what it does on one: gradients, refreshed constants, what is saved."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from chat_bases import save_base
from chat_runs import words_of, write_rows
from conftest import REPOSITORY, run_without_package
from safetensors.torch import load_file


# A step of plain gradient descent at rate 1: what a weight lost is its gradient
ONE_STEP = {
    "learning_rate": 1.0,
    "optim": "sgd",
    "max_grad_norm": 0,
    "weight_decay": 0,
    "warmup_steps": 0,
    "max_steps": 1,
}
LORA = {"use_peft": True, "lora_r": 4, "lora_dropout": 0, "train_norms": True}
# As multi_gpu.yaml has it
KEPT = {"gradient_checkpointing": True, "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
CASES = {
    "full": ("uniform_attention", KEPT),
    "fitted": ("fitted", {}),
    "lora": ("uniform_attention", LORA),
}
# Loads a folder where the package is not installed
LOAD = """
import transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__name__ == "BHyTLlamaForCausalLM"
"""


def run(command: list[str], folder: Path):
    environment = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, env=os.environ | environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("case", CASES)
def test_two_processes_take_the_step_of_one(tmp_path, case):
    estimator, options = CASES[case]
    start = save_base(tmp_path / "start", variance_estimator=estimator)
    rows = write_rows(tmp_path / "rows.jsonl", [["Q", "a" * (3 + 5 * n)] for n in range(4)])
    plan = yaml.safe_load((REPOSITORY / "sft" / "accelerate" / "fsdp2.yaml").read_text(encoding="utf-8"))
    plan |= {"num_processes": 2, "mixed_precision": "no", "use_cpu": True}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    options = {**ONE_STEP, **options, "refresh_constants_every": 1, "save_strategy": "steps", "save_steps": 1}
    options |= {"eval_data": rows} if "eval_strategy" in options else {}
    worker = str(Path(__file__).with_name("fsdp_worker.py"))
    launch = ["-m", "accelerate.commands.launch", "--config_file", "plan.yaml", worker]
    for name, start_of_command, batch in (("one", ["-m", "sft"], 4), ("two", launch, 2)):
        words = words_of(start, rows, tmp_path / name, **options, per_device_train_batch_size=batch)
        run([sys.executable, *start_of_command, *words], tmp_path)
    before, one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("start", "one", "two"))
    moved = 0
    for name, weight in before.items():
        expected, actual = weight - one[name], weight - two[name]
        if "variance_" in name:
            assert (one[name] - two[name]).abs() <= 1e-4 * one[name].abs(), name
        else:
            assert (expected - actual).abs().max() <= 1e-4 * expected.abs().max(), name
        moved += bool(expected.any())
    assert moved > 20
    assert not (tmp_path / "two" / ".unfinished").exists()
    kept = tmp_path / "two" / "checkpoint-1"
    if case == "lora":
        assert (kept / "adapter_config.json").is_file()
        return
    assert "FSDP" not in json.dumps(json.loads((kept / "config.json").read_text()))
    run_without_package(LOAD, tmp_path, "two/checkpoint-1")
