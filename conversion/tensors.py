"""What conversion makes of stored tensors: their dtype in the output, and a bias that only Llama's form has."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig

from checkpoints.weights import StoredTensors


def output_dtype(stored: torch.dtype, requested: str) -> torch.dtype:
    return stored if requested == "auto" else getattr(torch, requested)


class WithZeroOutputBias(StoredTensors):
    """Qwen2's tensors as Llama's: the o projection, which has no bias there, gets one of 0."""

    def __init__(self, files: list[Path], config: LlamaConfig):
        super().__init__(files)
        self._zeros = [f"model.layers.{layer}.self_attn.o_proj.bias" for layer in range(config.num_hidden_layers)]
        self.shapes |= {name: [config.hidden_size] for name in self._zeros}
        self.names += self._zeros

    def __getitem__(self, name: str) -> Tensor:
        if name in self._zeros:
            return torch.zeros(self.shapes[name], dtype=self["model.norm.weight"].dtype)
        return super().__getitem__(name)
