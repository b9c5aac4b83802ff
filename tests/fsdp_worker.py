"""python -m sft with FSDP2 on processes without GPUs, where accelerate leaves its FSDP settings aside and runs DDP."""

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from sft.__main__ import main
from sft.trainer import ChatTrainer


def shard_on_cpus():
    """accelerate takes the plugin of its settings as it does for MULTI_GPU."""
    plain = AcceleratorState.__init__

    def with_plugin(self, *args, fsdp_plugin=None, **kwargs):
        plain(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.fsdp_plugin = fsdp_plugin
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = with_plugin


def see_that_it_is_sharded():
    step = ChatTrainer.training_step

    def seen(self, *args, **kwargs):
        assert self.is_fsdp_enabled and self.accelerator.is_fsdp2
        assert all(isinstance(parameter, DTensor) for parameter in self.model.parameters())
        return step(self, *args, **kwargs)

    ChatTrainer.training_step = seen


if __name__ == "__main__":
    shard_on_cpus()
    see_that_it_is_sharded()
    main()
