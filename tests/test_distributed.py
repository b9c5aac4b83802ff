"""Two processes give what one gives: sharded training (FSDP2) and tensor parallel inference, over gloo on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from conftest import REPOSITORY, TINY, tiny_model
from distributed_worker import train


SHARDED = [
    (("bhyt", "sgd"), {}),
    (("bhyt", "adamw"), {"learnable_variance": True}),
    (("dyt", "sgd"), {}),
]
PARALLEL = ["bhyt", "bhyt_star", "dyt"]
ROWS = torch.randint(3, TINY["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """The results of each rank of distributed_worker.py."""
    folder = tmp_path_factory.mktemp("distributed")
    for norm_type in PARALLEL:
        tiny_model(norm_type).save_pretrained(folder / norm_type)
    torch.save({"rows": ROWS, "sharded": SHARDED, "parallel": PARALLEL}, folder / "task.pt")
    worker = Path(__file__).with_name("distributed_worker.py")
    paths = os.pathsep.join([str(REPOSITORY), str(worker.parent)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = subprocess.run(
        [*command, str(worker), str(folder)], env=environment, cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"results-{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", range(len(SHARDED)), ids=["-".join(case) for case, _ in SHARDED])
def test_sharded_training_ends_with_the_state_of_one_process(two_processes, case):
    (norm_type, optimizer), overrides = SHARDED[case]
    alone = tiny_model(norm_type, **overrides)
    before = {name: tensor.clone() for name, tensor in alone.state_dict().items()}
    train(alone, ROWS, optimizer)
    gathered = two_processes[0]["sharded"][case]
    assert gathered.keys() == before.keys()
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(gathered[name], tensor, rtol=0, atol=1e-5, msg=name)
        frozen = "variance_" in name and not overrides.get("learnable_variance")
        assert torch.equal(gathered[name], before[name]) is frozen, name


@pytest.mark.parametrize("norm_type", PARALLEL)
def test_tensor_parallel_logits_equal_those_of_one_process(two_processes, norm_type):
    with torch.no_grad():
        expected = tiny_model(norm_type)(ROWS).logits
    for rank in two_processes:
        result = rank["parallel"][norm_type]
        assert result["local_rows"] == TINY["hidden_size"] // 2
        torch.testing.assert_close(result["logits"], expected, rtol=0, atol=1e-4)


def test_modules_that_may_not_be_split_are_the_blocks_of_the_model(norm_type):
    model = tiny_model(norm_type)
    blocks = {type(layer).__name__ for layer in model.model.layers}
    assert set(model._no_split_modules) == set(model.model._no_split_modules) == blocks


@pytest.mark.parametrize("version", [1, 2])
def test_auto_wrap_policy_of_accelerate_finds_every_block(norm_type, version):
    model = tiny_model(norm_type)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, auto_wrap_policy="transformer_based_wrap")
    if version == 1:
        plugin.set_auto_wrap_policy(model)
        wrapped = plugin.auto_wrap_policy.keywords["transformer_layer_cls"]
        assert wrapped == {type(model.model.layers[0])}
    else:
        policy = fsdp2_prepare_auto_wrap_policy(plugin, model)
        assert [module for module in model.modules() if policy(module)] == list(model.model.layers)
