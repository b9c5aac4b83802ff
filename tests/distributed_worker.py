"""One of the processes of test_distributed.py, started by torchrun: sharded training, then tensor parallel logits."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import tiny_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

from modeling_bhyt import BHyTLlamaForCausalLM


OPTIMIZERS = {"sgd": {"lr": 0.5, "momentum": 0.9}, "adamw": {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}}


def train(model, rows, optimizer: str) -> list[float]:
    """Two steps on `rows`; the losses."""
    optimizers = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    stepper = optimizers[optimizer](model.parameters(), **OPTIMIZERS[optimizer])
    losses = []
    for _ in range(2):
        stepper.zero_grad()
        loss = model(rows, labels=rows, use_cache=False).loss
        loss.backward()
        stepper.step()
        losses.append(loss.item())
    return losses


def train_sharded(rank: int, norm_type: str, optimizer: str, rows, **overrides) -> dict[str, torch.Tensor]:
    """Every layer and the root sharded, each process trains on its own row; the gathered state."""
    model = tiny_model(norm_type, **overrides)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, rows[rank : rank + 1], optimizer)
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def main(folder: Path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    task = torch.load(folder / "task.pt")
    sharded = [train_sharded(rank, *case, task["rows"], **overrides) for case, overrides in task["sharded"]]
    logits = {}
    for name in task["parallel"]:
        model = BHyTLlamaForCausalLM.from_pretrained(folder / name, tp_plan="auto").eval()
        with torch.no_grad():
            output = model(task["rows"]).logits
        split = model.model.layers[0].self_attn.q_proj.weight
        logits[name] = {"logits": output, "local_rows": split.to_local().shape[0]}
    torch.save({"sharded": sharded, "parallel": logits}, folder / f"results-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
