"""Speed of the six norms in one model, as ratios to RMSNorm: python benchmarks/norm_speed.py [--help]

Models of one shape that differ in `norm_type` alone take turns in one process, round after round; what is reported is the
median, over the rounds, of each round's time over the same round's RMSNorm. Nothing else should run beside it.
"""

import argparse
import platform
import statistics
import time

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from modeling_bhyt import BHyTLlamaConfig, BHyTLlamaForCausalLM


NORM_TYPES = ["rmsnorm", "bhyt", "bhyt_star", "lns", "peri_ln", "dyt"]


def prefill(model, token_ids):
    with torch.no_grad():
        model(token_ids, use_cache=False)


def decode(model, token_ids):
    prompt = token_ids[:, :16]
    settings = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)


def train(model, token_ids):
    model(token_ids, labels=token_ids, use_cache=False).loss.backward()
    model.zero_grad()


WORK = {"prefill": prefill, "decode": decode, "train": train}


def seconds(work, model, token_ids) -> float:
    start = time.perf_counter()
    work(model, token_ids)
    if token_ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden_size", type=int, default=576)
    parser.add_argument("--num_layers", type=int, default=8)
    parser.add_argument("--batch_size", type=int, default=2)
    parser.add_argument("--length", type=int, default=256, help="tokens a row")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()

    shape = {
        "vocab_size": 1024,
        "hidden_size": arguments.hidden_size,
        "intermediate_size": arguments.hidden_size * 8 // 3,
        "num_hidden_layers": arguments.num_layers,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    }
    models = {}
    for norm_type in NORM_TYPES:
        torch.manual_seed(0)
        model = BHyTLlamaForCausalLM(BHyTLlamaConfig(**shape, norm_type=norm_type))
        models[norm_type] = model.to(arguments.device, getattr(torch, arguments.dtype))
    token_ids = torch.randint(3, 1024, (arguments.batch_size, arguments.length), device=arguments.device)

    times = {(name, norm): [] for name in WORK for norm in NORM_TYPES}
    for number in track(range(arguments.rounds + 1), description="rounds"):
        for name, work in WORK.items():
            for norm_type, model in models.items():
                taken = seconds(work, model, token_ids)
                if number:  # the first round warms up
                    times[name, norm_type].append(taken)

    table = Table("norm_type", *(f"{name}, x RMSNorm" for name in WORK))
    for norm_type in NORM_TYPES:
        ratios = [
            statistics.median(a / b for a, b in zip(times[name, norm_type], times[name, "rmsnorm"])) for name in WORK
        ]
        table.add_row(norm_type, *(f"{ratio:.3f}" for ratio in ratios))
    console = Console()
    console.print(
        f"{vars(arguments)}, torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} threads"
    )
    console.print(table)


if __name__ == "__main__":
    main()
