"""Inputs that are broken in every way that files are, from fixed seeds; and one process that runs the commands on them.

The process has a limit on its memory, and each run one on its time. `python tests/mutations.py FIRST LAST FOLDER KINDS`
runs the mutations FIRST to LAST - 1 of each kind in FOLDER, and prints one JSON line each with what is wrong, or null.
"""

import faulthandler
import json
import random
import resource
import shutil
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import yaml
from faults import Faults, Scenario, run, snapshot


MEMORY_BYTES, SECONDS = 6 * 2**30, 60
VALUES = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    2**31,
    2**63,
    -(2**70),
    1e308,
    float("nan"),
    float("inf"),
    1e-320,
    0.5,
    "",
    "x",
]
VALUES += [
    "0",
    "\ud800",
    "a\x00b",
    "../..",
    "\u202e" * 3,
    [],
    [1],
    [None],
    ["x", 2],
    {},
    {"x": 1},
    {"a": {"b": [None]}},
    "auto",
]
NUMBERS = [0, -1, 1, 7, 63, 2**20, 2**31, 2**40, 1e30, 0.1, "64"]


def broken_bytes(content: bytes, chance: random.Random) -> bytes:
    """Cut off, with bytes exchanged, inserted or left out."""
    kind = chance.randrange(5)
    at = chance.randrange(len(content) + 1)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + bytes(chance.randrange(256) for _ in range(chance.randrange(1, 9))) + content[at:]
    if kind == 2:
        return content[:at] + content[at + chance.randrange(1, 9) :]
    changed = bytearray(content)
    for _ in range(chance.randrange(1, 9)):
        # Headers stand first
        end = len(changed) if kind == 3 else min(len(changed), 400)
        changed[chance.randrange(end)] = chance.choice([0, 1, 255, 127, 128, chance.randrange(256)])
    return bytes(changed)


def broken_value(value, chance: random.Random):
    """The same JSON value with one part of it exchanged, taken out or added."""
    if isinstance(value, dict) and value and chance.random() < 0.8:
        changed = dict(value)
        name = chance.choice(list(changed))
        kind = chance.randrange(6)
        if kind == 0:
            del changed[name]
        elif kind == 1:
            changed[chance.choice(["x", "", "model_type", "architectures", "auto_map", name + "s"])] = chance.choice(
                VALUES
            )
        elif kind == 2 and isinstance(changed[name], (int, float)):
            changed[name] = chance.choice(NUMBERS)
        else:
            changed[name] = broken_value(changed[name], chance)
        return changed
    if isinstance(value, list) and value and chance.random() < 0.8:
        changed = list(value)
        at = chance.randrange(len(changed))
        kind = chance.randrange(4)
        if kind == 0:
            del changed[at]
        elif kind == 1:
            changed.insert(at, chance.choice(VALUES))
        else:
            changed[at] = broken_value(changed[at], chance)
        return changed
    return chance.choice(VALUES)


def nested(chance: random.Random) -> bytes:
    """JSON and YAML deeper than a reader's stack."""
    return chance.choice([b"[", b'{"a":']) * 100_000


def break_json(file: Path, chance: random.Random):
    if chance.random() < 0.02:
        file.write_bytes(nested(chance))
        return
    if chance.random() < 0.2:
        file.write_bytes(broken_bytes(file.read_bytes(), chance))
        return
    value = json.loads(file.read_text(encoding="utf-8"))
    for _ in range(chance.randrange(1, 3)):
        value = broken_value(value, chance)
    file.write_text(json.dumps(value), encoding="utf-8")


def break_config(folder: Path, chance: random.Random):
    files = ["config.json"] * 4 + ["generation_config.json", "tokenizer_config.json", "tokenizer.json"]
    break_json(folder / "source" / chance.choice(files), chance)


def break_safetensors(folder: Path, chance: random.Random):
    file = folder / "source" / "model.safetensors"
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    if chance.random() < 0.3:
        file.write_bytes(broken_bytes(content, chance))
        return
    header = json.loads(content[8 : 8 + size])
    name = chance.choice([name for name in header if name != "__metadata__"])
    if chance.random() < 0.5:
        header[name] = broken_value(header[name], chance)
    elif chance.random() < 0.5:
        header[name]["dtype"] = chance.choice(["BF16", "F64", "I64", "F8_E4M3", "U8", "F16", "BOOL", "Q4"])
    else:
        header = broken_value(header, chance)
    text = json.dumps(header).encode()
    length = chance.choice([len(text)] * 8 + [0, len(text) + 5, 2**40, 2**63])
    file.write_bytes(struct.pack("<Q", length) + text + content[8 + size :])


def break_gguf(folder: Path, chance: random.Random):
    file = folder / "model.gguf"
    file.write_bytes(broken_bytes(file.read_bytes(), chance))


def break_rows(folder: Path, chance: random.Random):
    file = folder / "rows.jsonl"
    if chance.random() < 0.02:
        file.write_bytes(file.read_bytes() + b"\n" + nested(chance))
        return
    if chance.random() < 0.3:
        file.write_bytes(broken_bytes(file.read_bytes(), chance))
        return
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(lines))
        lines[at] = broken_value(lines[at], chance)
    text = "\n".join(json.dumps(line) for line in lines)
    file.write_text(text, encoding="utf-8")


def break_recipe(folder: Path, chance: random.Random):
    file = folder / "recipe.yaml"
    if chance.random() < 0.02:
        file.write_bytes(b"output: " + nested(chance))
        return
    if chance.random() < 0.25:
        file.write_bytes(broken_bytes(file.read_bytes(), chance))
        return
    values = yaml.safe_load(file.read_text(encoding="utf-8"))
    for _ in range(chance.randrange(1, 3)):
        values = broken_value(values, chance)
    file.write_text(yaml.safe_dump(values, allow_unicode=False), encoding="utf-8")


TEXT_FREE = {
    "num_calibration_tokens": 0,
    "num_report_tokens": 0,
    "variance_estimator": "uniform_attention",
    "basis": "original",
}
TEXT_FREE |= {"attention_lambda": [0.25], "mlp_lambda": [0.25]}
GRAFT_RECIPE = TEXT_FREE | {
    "source": "source",
    "output": "out",
    "budget": 0.01,
    "force": True,
    "kappa": 10.0,
    "seed": 1,
    "dtype": "auto",
}
GRAFT_RECIPE |= {
    "window_length": 16,
    "batch_size": 2,
    "max_shard_size": "1MB",
    "max_memory": ["cpu=4GiB"],
    "exact_variance_layers": ["0"],
}
GRAFT_RECIPE |= {
    "save_steps": 5,
    "learning_rate": 0.01,
    "train": "norms",
    "target_lambda": 1.0,
    "overwrite": False,
    "heal_text": None,
}
ROWS = [
    {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": [{"type": "text", "text": "a"}]},
        ],
        "id": 3,
    },
    {
        "messages": [
            {"role": "user", "content": "q", "name": None},
            {"role": "assistant", "content": "a", "weight": 1},
        ],
        "tools": None,
    },
]


def _words(values: dict) -> list[str]:
    words = []
    for name, value in values.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def _conversion():
    from conversion.__main__ import main

    return main


def _sft():
    from sft.__main__ import main

    return main


def _prepare_source(folder: Path):
    from test_graft import save_source

    save_source(folder / "source", num_hidden_layers=1)


def _prepare_gguf(folder: Path):
    from conftest import tiny_llama
    from test_gguf import write_gguf

    write_gguf(folder / "model.gguf", tiny_llama(num_hidden_layers=1))


def _prepare_chat(folder: Path):
    from chat_bases import save_base

    save_base(folder / "base", num_hidden_layers=1)
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS * 2), encoding="utf-8")


def _training() -> dict:
    from chat_runs import QUICK

    return {"model_name_or_path": "base", "data": "rows.jsonl", "output_dir": "out", **QUICK, "dry_run": True}


def _prepare_sft_recipe(folder: Path):
    _prepare_chat(folder)
    recipe = _training() | {"lora_r": 4, "use_peft": True, "lora_target_modules": "all-linear", "max_length": 64}
    recipe |= {"questions": ["a?"], "num_perplexity_windows": 2, "lr_scheduler_type": "cosine", "warmup_steps": 0.1}
    recipe |= {"save_dtype": "auto", "seed": 3, "packing": False, "refresh_constants_every": 0, "optim": "adamw_torch"}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def _prepare_graft_recipe(folder: Path):
    _prepare_source(folder)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(GRAFT_RECIPE))


Break = Callable[[Path, random.Random], None]


def scenarios() -> dict[str, tuple[Scenario, Break]]:
    """What is run on each kind of input, and what breaks that input."""
    plain = _words(TEXT_FREE)
    # A recipe may well ask for days of work
    few = ["--num_calibration_tokens", "0", "--num_report_tokens", "0"]
    return {
        "config": (
            Scenario("graft", _prepare_source, _conversion(), ["graft", "source", "out", *plain]),
            break_config,
        ),
        "safetensors": (
            Scenario("graft", _prepare_source, _conversion(), ["graft", "source", "out", *plain]),
            break_safetensors,
        ),
        "gguf": (Scenario("graft", _prepare_gguf, _conversion(), ["graft", "model.gguf", "out", *plain]), break_gguf),
        "graft recipe": (
            Scenario("graft", _prepare_graft_recipe, _conversion(), ["graft", "--config", "recipe.yaml", *few]),
            break_recipe,
        ),
        "rows": (Scenario("sft", _prepare_chat, _sft(), _words(_training()), grad=True), break_rows),
        "sft recipe": (
            Scenario("sft", _prepare_sft_recipe, _sft(), ["--config", "recipe.yaml", "--dry_run", "true"], grad=True),
            break_recipe,
        ),
    }


class TooLong(BaseException):
    """A run did not end in time."""


def _ring(number, frame):
    raise TooLong(f"no end after {SECONDS} s")


def wrong(kind: str, seed: int, template: Path, folder: Path) -> str | None:
    """What is wrong with the end of mutation `seed`; None for success, or for exit 2 with one line and nothing written."""
    scenario, break_input = scenarios()[kind]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(template, folder)
    break_input(folder, random.Random(f"{kind} {seed}"))
    before = snapshot(folder)
    signal.signal(signal.SIGALRM, _ring)
    signal.alarm(SECONDS)
    try:
        end = run(scenario, folder, Faults("/nowhere"))
    finally:
        signal.alarm(0)
    said = " | ".join(end.errors.splitlines())[-400:]
    if end.code == 0:
        return None
    if end.code != 2:
        return f"ended with {end.code!r}: {said}"
    if len(end.lines) != 1 or "Traceback" in end.errors:
        return f"did not say one line: {said}"
    return None if end.files == before else f"left {sorted(end.files.keys() ^ before.keys())[:4]}: {said}"


def main(first: str, last: str, place: str, *kinds: str):
    faulthandler.enable()
    torch.set_num_threads(1)
    templates = {kind: Path(place) / kind for kind in kinds}
    for kind, template in templates.items():
        template.mkdir(parents=True)
        scenarios()[kind][0].prepare(template)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for kind, template in templates.items():
        for seed in range(int(first), int(last)):
            print(json.dumps([kind, seed, wrong(kind, seed, template, Path(place) / "work")]), flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import conftest  # noqa: F401

    main(*sys.argv[1:])
