"""What conversion makes of stored tensors: their dtype in the output, and a bias that only Llama's form has."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import LlamaConfig

from checkpoints.weights import LazyTensors


def output_dtype(stored: torch.dtype, requested: str) -> torch.dtype:
    return stored if requested == "auto" else getattr(torch, requested)


class WithZeroOutputBias(LazyTensors):
    """Qwen2's tensors as Llama's: the o projection, which has no bias there, gets one of 0."""

    def __init__(self, tensors: Mapping[str, Tensor], config: LlamaConfig):
        self._tensors, self._size = tensors, config.hidden_size
        self._zeros = [f"model.layers.{layer}.self_attn.o_proj.bias" for layer in range(config.num_hidden_layers)]
        self.names = [*tensors, *self._zeros]

    def __getitem__(self, name: str) -> Tensor:
        if name in self._zeros:
            return torch.zeros(self._size, dtype=self._tensors["model.norm.weight"].dtype)
        return self._tensors[name]
