"""Rotates the residual stream of a Llama, so that no channel stands out and tanh works in its linear range.

RMSNorm without its gain commutes with an orthogonal Q (SliceGPT, arXiv 2401.15024; QuaRot, arXiv 2404.00456). So every
gain is folded into the projections that read the norm (the final one into the head, which unties it from the
embeddings), and the residual stream x becomes x Q:

    embeddings            E' = E Q
    reading projections   W' = W diag(gamma) Q        q, k, v, gate, up, head
    writing projections   W' = Q^T W, b' = b Q        o, down
    gains                 gamma' = 1

The model computes the same function. All of it happens in float64, rounded once to the dtype of each tensor.
"""

import math
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from checkpoints.weights import LazyTensors
from evaluation.perplexity import input_device

from .source import Source
from .tensors import output_dtype


EMBEDDINGS, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
# The norm that each projection reads
READERS = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "self_attn.v_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
}
WRITERS = ("self_attn.o_proj", "mlp.down_proj")
# Hadamard matrices of up to this size are multiplied as they are; a larger one is a product of several
LARGEST_HADAMARD = 64
ROWS_AT_ONCE = 4096
# Rounding to bf16 costs about 1e-3 nats a token
MAX_ROTATION_KL = 0.02


class Rotation:
    """x -> x Q with an orthogonal Q = diag(signs) (Hartley_m (x) Hadamard_2 (x) ...), D = m 2^k with m odd.

    The signs are random, by seed. A Kronecker product is applied factor by factor: D log(D) operations, not D^2.
    """

    def __init__(self, size: int, seed: int):
        odd, exponent = size, 0
        while odd % 2 == 0:
            odd, exponent = odd // 2, exponent + 1
        self.factors = [hartley(odd)] if odd > 1 else []
        while exponent > 0:
            power = min(exponent, LARGEST_HADAMARD.bit_length() - 1)
            self.factors.append(hadamard(power))
            exponent -= power
        generator = torch.Generator().manual_seed(seed)
        self.signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1

    def __call__(self, x: Tensor, dim: int = -1, dtype: torch.dtype = torch.float64) -> Tensor:
        """x Q along `dim`."""
        x = x.to(dtype).movedim(dim, -1) * self.signs.to(x.device, dtype)
        shape = x.shape
        x = x.reshape(*shape[:-1], *(len(factor) for factor in self.factors))
        for axis, factor in enumerate(self.factors, start=len(shape) - 1):
            x = (x.movedim(axis, -1) @ factor.to(x.device, dtype)).movedim(-1, axis)
        return x.reshape(shape).movedim(-1, dim)


def hadamard(power: int) -> Tensor:
    """The orthonormal Hadamard matrix of size 2^power (Sylvester's), float64."""
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / math.sqrt(2)
    return reduce(torch.kron, [pair] * power)


def hartley(size: int) -> Tensor:
    """H[j, k] = (cos + sin)(2 pi j k / size) / sqrt(size): symmetric and orthogonal for every size, float64."""
    index = torch.arange(size, dtype=torch.float64)
    angle = 2 * math.pi * (torch.outer(index, index) % size) / size
    return (angle.cos() + angle.sin()) / math.sqrt(size)


class RotatedBasis:
    """How a site looks after the rotation, seen from the source as it is: gains folded, x Q."""

    name = "rotated"

    def __init__(self, rotation: Rotation):
        self._rotation = rotation

    def state(self, x: Tensor) -> Tensor:
        return self._rotation(x, dtype=torch.float32)

    def gain(self, gamma: Tensor) -> Tensor:
        return torch.ones_like(gamma)

    def gradient(self, g: Tensor, gamma: Tensor) -> Tensor:
        return self._rotation(g * gamma, dtype=torch.float32)


class RotatedTensors(LazyTensors):
    """A source's tensors in the rotated basis, each computed when it is asked for and rounded to `dtype` ("auto": its own)."""

    def __init__(self, source: Source, rotation: Rotation, dtype: str):
        self._tensors, self._rotation, self._dtype = source.tensors, rotation, dtype
        self.names = [name for name in source.tensors if name not in source.recomputed]
        if HEAD not in self.names:
            self.names.append(HEAD)

    def __getitem__(self, name: str) -> Tensor:
        # A tied head is the embeddings
        stored = self._tensors[EMBEDDINGS if name == HEAD and HEAD not in self._tensors else name]
        dtype = output_dtype(stored.dtype, self._dtype)
        if name in (EMBEDDINGS, HEAD):
            # A vocabulary in float64 would be the largest thing in memory
            return torch.cat([self._as(dtype, name, rows) for rows in stored.split(ROWS_AT_ONCE)])
        return self._as(dtype, name, stored).contiguous()

    def _as(self, dtype: torch.dtype, name: str, stored: Tensor) -> Tensor:
        rotated = self._rotated(name, stored).to(dtype)
        if dtype == torch.float16 and not rotated.isfinite().all():
            raise ValueError(
                f"{name} does not fit float16 once its norm's gain is in it: take --dtype bfloat16 or float32"
            )
        return rotated

    def _rotated(self, name: str, stored: Tensor) -> Tensor:
        if name == EMBEDDINGS:
            return self._rotation(stored)
        if name == HEAD:
            return self._rotation(stored.double() * self._tensors[FINAL_NORM].double())
        if name.endswith("norm.weight"):
            return torch.ones_like(stored)
        # model.layers.7.self_attn.q_proj.weight
        _, _, layer, path = name.split(".", 3)
        module, kind = path.rsplit(".", 1)
        if module in WRITERS:
            return self._rotation(stored, dim=0)
        if module in READERS and kind == "weight":
            gain = self._tensors[f"model.layers.{layer}.{READERS[module]}.weight"]
            return self._rotation(stored.double() * gain.double())
        return stored


def rotate(source: Source, seed: int, dtype: str = "auto") -> Source:
    """The same model in another basis: unit gains, untied embeddings. Its `model` stands in memory, whole."""
    config = deepcopy(source.config)
    config.tie_word_embeddings = False
    tensors = RotatedTensors(source, Rotation(config.hidden_size, seed), dtype)
    base = replace(source, config=config, tensors=tensors, recomputed=[], placement={})
    base.open_model = lambda: model_of(base)
    return base


def model_of(base: Source) -> LlamaForCausalLM:
    """The rotated RMSNorm Llama in memory."""
    with torch.device("meta"):
        model = LlamaForCausalLM(base.config)
    # A model runs in one dtype, that of its embeddings
    dtype = base.tensors[EMBEDDINGS].dtype
    model.load_state_dict({name: tensor.to(dtype) for name, tensor in base.tensors.items()}, assign=True)
    # Its tables are no tensors of the checkpoint, and stand on the meta device still
    model.model.rotary_emb = LlamaRotaryEmbedding(base.config)
    return model.eval()


@dataclass
class RotationCheck:
    """The rotated model against the source before any norm is replaced, on one window of text.

    untied_bytes: what the head of its own adds to the file, 0 where the source had one.
    """

    seed: int
    max_logit_difference: float
    max_logit: float
    kl_nats_per_token: float
    untied_bytes: int


@torch.no_grad()
def check_rotation(source: Source, base: Source, window: Tensor, seed: int) -> RotationCheck:
    """Computes both models' logits over `window` (T,) of token ids.

    Raises:
        ValueError: the rotated model computes something else.
    """
    rotated = model_of(base)
    ids = window[None]
    expected = source.model(ids.to(input_device(source.model)), use_cache=False).logits.float().cpu()
    actual = rotated(ids, use_cache=False).logits.float()
    kl = kl_div(actual.log_softmax(-1), expected.log_softmax(-1), reduction="sum", log_target=True).item() / len(
        window
    )
    difference = (actual - expected).abs().max().item()
    if not kl < MAX_ROTATION_KL:
        raise ValueError(
            f"the rotated model differs from the source by {kl:.3g} nats a token, {MAX_ROTATION_KL} at most are rounding: "
            "take --basis original, or --dtype float32"
        )
    head = base.tensors[HEAD]
    untied_bytes = head.nbytes if source.config.tie_word_embeddings else 0
    return RotationCheck(seed, difference, expected.abs().max().item(), kl, untied_bytes)
