"""README's table: grafts of SmolLM2-135M calibrated on one text that the model wrote, each against its source on C4 and
WikiText-2.

Usage: BHYT_DATA=FOLDER python runs/smollm2_figures.py FOLDER [NAME ...]   (all of them: about 3 hours on two cores)
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers import AutoModelForCausalLM

import modeling_bhyt  # noqa: F401
from conversion.__main__ import both_bases, graft_texts
from conversion.arguments import GraftArguments, HealArguments, parse
from conversion.choice import candidates, choose, graft_of, measured_costs
from conversion.graft import GraftedTensors, Sites, fit_sites
from conversion.heal import heal_model, trained_tensors
from conversion.measuring import NATURAL_SHARE
from conversion.rotation import rotate
from conversion.saving import save_checkpoint
from conversion.source import read_source
from evaluation.perplexity import read_documents, text_windows


NUM_WINDOWS = {"C4": 40, "WikiText-2": 20}
LAMBDA_1 = ["--attention_lambda", "1", "--mlp_lambda", "1"]
SETUPS = {
    "default": [],
    "2 exact": [*LAMBDA_1, "--exact_variance_layers", "0,24"],
    "4 exact": [*LAMBDA_1, "--exact_variance_layers", "0,1,2,24"],
    "6 exact": [*LAMBDA_1, "--exact_variance_layers", "0,1,2,24,27,29"],
    "8 exact": [*LAMBDA_1, "--exact_variance_layers", "0,1,2,8,20,24,27,29"],
    "all exact": [*LAMBDA_1, "--variance_estimator", "exact"],
    "lambda 2, 1": ["--attention_lambda", "2", "--mlp_lambda", "1", "--exact_variance_layers", "0,1,2,24,27,29"],
    "original": ["--basis", "original"],
    "lambda 2": ["--attention_lambda", "2", "--mlp_lambda", "2", "--exact_variance_layers", "0"],
    "published": [*LAMBDA_1, "--variance_estimator", "published"],
}
HEALED = {f"{name}, healed": name for name in ("lambda 2", "published")}
HEALING = ["--heal_tokens", "98304", "--heal_batch_size", "2", "--learning_rate", "0.003", "--freeze_lambda"]


def make(names: list[str], gguf: str, output: Path):
    """Saves each graft in output/NAME; source, text, statistics of the text are shared."""
    shared = parse(GraftArguments, [gguf, str(output / "unused")])
    source = read_source(gguf)
    windows = graft_texts(source, shared).windows(shared.seed)["calibration"]
    bases = both_bases(source, shared.seed)
    rotated = rotate(source, shared.seed)
    for name in names:
        arguments = parse(GraftArguments, [gguf, str(output / name), *SETUPS[name]])
        sites = Sites(
            source,
            rotated if arguments.basis == "rotated" else source,
            arguments,
            candidates(arguments, source.config.num_hidden_layers),
        )
        fit_sites(sites, bases, windows)
        choice = choose(measured_costs(sites, bases, windows), arguments, arguments.budget / NATURAL_SHARE)
        grafted = graft_of(choice, sites)
        (output / name).mkdir(parents=True)
        tensors = GraftedTensors(sites.base, grafted, arguments.dtype)
        save_checkpoint(
            output / name, modeling_bhyt.BHyTLlamaForCausalLM, grafted.config, tensors, source, float("inf")
        )
        print(name, "exact:", choice.exact_layers(), "predicted:", choice.predicted, flush=True)
        del sites, tensors


def heal(name: str, gguf: str, output: Path):
    """Saves the healed graft in output/NAME; documents of C4 that `compare` does not read, norm parameters alone."""
    text = f"{os.environ['BHYT_DATA']}/c4_en_valid.jsonl[200:500]"
    start = output / HEALED[name]
    words = [str(start), str(output / name), "--teacher", gguf, "--heal_text", text, *HEALING]
    if Path(f"{output / name}.checkpoints").exists():
        words.append("--resume")
    arguments = parse(HealArguments, words)
    teacher = read_source(gguf)
    windows = text_windows(
        teacher.tokenizer, read_documents(text), arguments.window_length, arguments.num_heal_windows
    )
    model = heal_model(start, teacher.model, windows, arguments)
    (output / name).mkdir()
    tensors = trained_tensors(model, start)
    config = modeling_bhyt.BHyTLlamaConfig.from_pretrained(start)
    save_checkpoint(output / name, modeling_bhyt.BHyTLlamaForCausalLM, config, tensors, teacher, float("inf"))


@torch.no_grad()
def compare(folders: list[Path], gguf: str) -> dict:
    """Perplexity over the source's and KL of each folder, the source's logits computed once for all of them."""
    source = read_source(gguf)
    models = {folder.name: AutoModelForCausalLM.from_pretrained(folder) for folder in folders}
    data = Path(os.environ["BHYT_DATA"])
    texts = {"C4": f"{data / 'c4_en_valid.jsonl'}[100:]", "WikiText-2": str(data / "wikitext2_raw_test.txt")}
    results: dict = {}
    for text, path in texts.items():
        num_windows = NUM_WINDOWS[text]
        windows = text_windows(source.tokenizer, read_documents(path), 512, num_windows)
        sums = {name: [0.0, 0.0] for name in models}
        loss = 0.0
        for batch in track(windows.split(2), description=text):
            expected = source.model(batch, use_cache=False).logits[:, :-1].log_softmax(-1)
            taken = expected.gather(-1, batch[:, 1:, None])
            loss -= taken.sum().item()
            for name, model in models.items():
                actual = model(batch, use_cache=False).logits[:, :-1].log_softmax(-1)
                sums[name][0] += (taken - actual.gather(-1, batch[:, 1:, None])).sum().item()
                sums[name][1] += (expected.exp() * (expected - actual)).sum().item()
        count = num_windows * 511
        results[text] = {"source": torch.tensor(loss / count).exp().item()} | {
            name: {"ratio": torch.tensor(rise / count).exp().item(), "kl": kl / count}
            for name, (rise, kl) in sums.items()
        }
    return results


def main():
    output = Path(sys.argv[1])
    gguf = subprocess.run(
        [sys.executable, "runs/find_smollm2.py"], capture_output=True, text=True, check=True
    ).stdout.strip()
    names = sys.argv[2:] or [*SETUPS, *HEALED]
    grafts = dict.fromkeys(HEALED.get(name, name) for name in names)
    if missing := [name for name in grafts if not (output / name).exists()]:
        make(missing, gguf, output)
    for name in names:
        if name in HEALED and not (output / name).exists():
            heal(name, gguf, output)
    results = compare([output / name for name in names], gguf)
    table = Table("set-up", *(f"{text}: ratio, KL" for text in results))
    for name in names:
        table.add_row(name, *(f"{found[name]['ratio']:.4f}  {found[name]['kl']:.4f}" for found in results.values()))
    Console().print(table, {text: found["source"] for text, found in results.items()})
    with (output / "figures.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
