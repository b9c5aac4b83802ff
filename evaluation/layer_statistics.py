"""Size of the hidden states at each depth: mean |x| and variance of every layer's output (figure 3 of arXiv 2601.09719)."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass
class LayerStatistics:
    """Of one layer's output: the variance over a token's channels and the mean of |x|, both averaged over tokens."""

    layer: int
    variance: float
    mean_absolute: float


class LayerMeter:
    """Measures a model's layers while it runs inside `watch`.

    A window's first token is left out: its massive activation, thousands of times the others', would be all that shows.
    """

    def __init__(self, model: PreTrainedModel):
        self._layers = model.model.layers
        self._sums = torch.zeros(len(self._layers), 3, dtype=torch.float64)

    @contextmanager
    def watch(self) -> Iterator[None]:
        handles = [layer.register_forward_hook(self._hook(number)) for number, layer in enumerate(self._layers)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, number: int):
        def see(module, arguments, output):
            x = output[:, 1:].float()
            variances = x.var(-1, correction=0)
            sums = [variances.double().sum(), x.abs().mean(-1).double().sum(), variances.numel()]
            self._sums[number] += torch.tensor([float(value) for value in sums], dtype=torch.float64)

        return see

    def statistics(self) -> list[LayerStatistics]:
        return [
            LayerStatistics(number, variance / count, absolute / count)
            for number, (variance, absolute, count) in enumerate(self._sums.tolist())
        ]
