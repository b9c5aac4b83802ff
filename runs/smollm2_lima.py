"""SmolLM2-135M and its default graft, fine-tuned on LIMA by one recipe, three seeds each, side by side.

Usage: BHYT_DATA=FOLDER python runs/smollm2_lima.py FOLDER [NAME ...]   (3 hours a name on one core; names run beside each
other from two shells; started again, it goes on)

NAME is source or graft, both by default, or one that tells causes apart, trained with one seed and not evaluated: folded
(a plain Llama, gains multiplied into the projections that read them), rotated (a plain Llama in the graft's basis) and
original (a graft in the original basis).
"""

import csv
import json
import os
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path
from statistics import mean, stdev

import torch
from rich.console import Console
from rich.table import Table

from checkpoints.command_line import fail
from conversion.rotation import READERS, model_of, rotate
from conversion.source import read_source


SEEDS = (0, 1, 2)
COMPARED, CONTROLS = ("source", "graft"), ("folded", "rotated", "original")
RECIPE = "sft/recipes/smollm2_cpu.yaml"


def run(*words: str):
    subprocess.run([sys.executable, "-m", *words], check=True)


def make_base(name: str, folder: Path) -> Path:
    """The checkpoint of that name, made where it is not there yet."""
    base = folder / name
    if (base / "config.json").exists():
        return base
    find = [sys.executable, "runs/find_smollm2.py"]
    gguf = subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip()
    if name in ("graft", "original"):
        run("conversion", "graft", gguf, str(base), "--basis", "original" if name == "original" else "rotated")
        return base
    source = read_source(gguf)
    model = model_of(rotate(source, seed=0)) if name == "rotated" else source.model
    if name == "folded":
        fold_gains(model)
    model.save_pretrained(base)
    source.tokenizer.save_pretrained(base)
    return base


@torch.no_grad()
def fold_gains(model):
    """W' = W diag(gamma), gamma' = 1 in every block: the same function, in which Adam's step on W is 1 / gamma times as large."""
    for layer in model.model.layers:
        for projection, norm in READERS.items():
            layer.get_submodule(projection).weight.mul_(layer.get_submodule(norm).weight)
        for norm in set(READERS.values()):
            layer.get_submodule(norm).weight.fill_(1)


def fine_tune(base: Path, output: Path, seed: int, known: Path, evaluate: bool):
    """One run of the recipe, gone on with where it was stopped; figures of the base are measured once for all seeds."""
    if (output / "results.json").exists():
        return
    data = Path(os.environ["BHYT_DATA"])
    words = ["sft", "--config", RECIPE, "--model_name_or_path", str(base), "--output_dir", str(output)]
    words += ["--data", f"{data / 'lima1k.json'}[:250]", "--seed", str(seed)]
    words += ["--data_license", "other, non-commercial"]
    if evaluate:
        words += ["--eval_data", f"{data / 'eval_csqa_qnli_rte.json'}[:200]"]
        words += ["--perplexity_data", f"{data / 'c4_en_valid.jsonl'}[100:]", str(data / "wikitext2_raw_test.txt")]
    else:
        words += ["--max_answer_tokens", "0"]
    if any(output.glob("checkpoint-*")):
        words += ["--resume_from_checkpoint", "last"]
    else:
        words += ["--overwrite"] if output.exists() else []
        words += ["--figures_before", str(known)] if known.exists() else []
    run(*words)


def figures(results: dict) -> dict[str, float]:
    """The numbers of one run that the table shows."""
    before, after = results["before"], results["after"]
    found = {"training loss": results["training"]["mean_loss"]}
    for text, old in before["perplexity"].items():
        found[f"{text}: perplexity before"] = old["perplexity"]
        found[f"{text}: perplexity after"] = after["perplexity"][text]["perplexity"]
        found[f"{text}: rise"] = after["perplexity"][text]["perplexity"] / old["perplexity"] - 1
    for name, replies in (("before", before["replies"]), ("after", after["replies"])):
        found[f"CommonsenseQA: loss {name}"] = replies["loss"]
        found[f"CommonsenseQA: first token right {name}"] = replies["first_token_accuracy"]
    return found


def save_losses(folder: Path):
    """losses.csv: every step's training loss of the first seed, a column a name, as far as each has come."""
    columns = {}
    for name in (*COMPARED, *CONTROLS):
        file = folder / f"{name}-{SEEDS[0]}" / "training_log.csv"
        if file.is_file():
            with file.open(encoding="utf-8", newline="") as stream:
                columns[name] = [row["loss"] for row in csv.DictReader(stream) if row["loss"]]
    with (folder / "losses.csv").open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["step", *columns])
        writer.writerows([step, *row] for step, row in enumerate(zip_longest(*columns.values()), start=1))


def main():
    folder = Path(sys.argv[1])
    names = sys.argv[2:] or COMPARED
    if unknown := set(names) - {*COMPARED, *CONTROLS}:
        fail(f"{min(unknown)!r} is no base: give one of {', '.join((*COMPARED, *CONTROLS))}")
    folder.mkdir(parents=True, exist_ok=True)
    bases = {name: make_base(name, folder) for name in names}
    for seed in SEEDS:
        for name in names:
            if name in COMPARED or seed == SEEDS[0]:
                known = folder / f"{name}-{SEEDS[0]}" / "before.json"
                fine_tune(bases[name], folder / f"{name}-{seed}", seed, known, name in COMPARED)
    save_losses(folder)
    results = {name: [folder / f"{name}-{seed}" / "results.json" for seed in SEEDS] for name in COMPARED}
    if not all(file.exists() for files in results.values() for file in files):
        return
    runs = {name: [figures(json.loads(file.read_text())) for file in files] for name, files in results.items()}
    table = Table("", *(f"{name}: mean, spread" for name in COMPARED))
    for key in runs["source"][0]:
        values = [[found[key] for found in runs[name]] for name in COMPARED]
        table.add_row(key, *(f"{mean(numbers):.4f}  {stdev(numbers):.4f}" for numbers in values))
    Console().print(table)
    (folder / "figures.json").write_text(json.dumps(runs, indent=2) + "\n")


if __name__ == "__main__":
    main()
