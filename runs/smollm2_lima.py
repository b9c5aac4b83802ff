"""SmolLM2-135M and its default graft, fine-tuned on LIMA by one recipe, three seeds each, side by side.

Usage: BHYT_DATA=FOLDER python runs/smollm2_lima.py FOLDER [source|graft]   (about 2 hours on two cores; started again, it
goes on; one of the two alone runs beside the other)
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table

from conversion.source import read_source


SEEDS = (0, 1, 2)
RECIPE = "sft/recipes/smollm2_cpu.yaml"


def run(*words: str):
    subprocess.run([sys.executable, "-m", *words], check=True)


def make_bases(folder: Path) -> dict[str, Path]:
    """The source as a plain checkpoint, and its default graft."""
    find = [sys.executable, "runs/find_smollm2.py"]
    gguf = subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip()
    bases = {"source": folder / "source", "graft": folder / "graft"}
    if not (bases["source"] / "config.json").exists():
        source = read_source(gguf)
        source.model.save_pretrained(bases["source"])
        source.tokenizer.save_pretrained(bases["source"])
    if not bases["graft"].exists():
        run("conversion", "graft", gguf, str(bases["graft"]))
    return bases


def fine_tune(base: Path, output: Path, seed: int, known: Path):
    """One run of the recipe, gone on with where it was stopped; figures of the base are measured once for all seeds."""
    if (output / "results.json").exists():
        return
    data = Path(os.environ["BHYT_DATA"])
    words = ["sft", "--config", RECIPE, "--model_name_or_path", str(base), "--output_dir", str(output)]
    words += ["--data", f"{data / 'lima1k.json'}[:250]", "--eval_data", f"{data / 'eval_csqa_qnli_rte.json'}[:200]"]
    words += ["--perplexity_data", f"{data / 'c4_en_valid.jsonl'}[100:]", str(data / "wikitext2_raw_test.txt")]
    words += ["--seed", str(seed)]
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


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    bases = make_bases(folder)
    for seed in SEEDS:
        for name in sys.argv[2:] or bases:
            fine_tune(bases[name], folder / f"{name}-{seed}", seed, folder / f"{name}-{SEEDS[0]}" / "before.json")
    if not all((folder / f"{name}-{seed}" / "results.json").exists() for name in bases for seed in SEEDS):
        return
    table = Table("", *(f"{name}: mean, spread" for name in bases))
    runs = {
        name: [figures(json.loads((folder / f"{name}-{seed}" / "results.json").read_text())) for seed in SEEDS]
        for name in bases
    }
    for key in runs["source"][0]:
        values = {name: [found[key] for found in runs[name]] for name in bases}
        table.add_row(key, *(f"{mean(numbers):.4f}  {stdev(numbers):.4f}" for numbers in values.values()))
    Console().print(table)
    (folder / "figures.json").write_text(json.dumps(runs, indent=2) + "\n")


if __name__ == "__main__":
    main()
