# Copyright 2026 The bhyt authors. Licensed under the Apache License, Version 2.0.
"""The estimator's c of one block, from its weights as they are now, wherever training keeps them.

FSDP2 and tensor parallelism hold a parameter in shards: it is gathered, a collective that every process has to join.
PEFT puts a LoRA layer in a projection's place, and a trained copy of a norm beside the original. What cannot be read as
plain numbers (4 or 8 bits, ZeRO-3, FSDP1, offload, other adapters) is refused.
"""

import torch
from torch import Tensor, nn

from .configuration_bhyt import BHyTLlamaConfig
from .normalization_bhyt import BHyT, RMSNormSite, attention_variance


FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def running_module(module: nn.Module) -> nn.Module:
    """The module that runs: of PEFT's `modules_to_save` the active copy, the original where none is active."""
    if not hasattr(module, "modules_to_save"):
        return module
    active = [name for name in module.active_adapters if name in module.modules_to_save]
    return module.original_module if module.disable_adapters or not active else module.modules_to_save[active[0]]


def gathered(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def whole(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The numbers of a parameter of this shape, gathered where they are sharded; without gradient.

    Raises:
        ValueError: it holds something else.
    """
    # FSDP1 leaves a view of freed memory, or a piece, in a parameter's place; DeepSpeed marks what it partitions; torchao's
    # tensors have the dtype and shape of what they stand for, and are parameters by isinstance: only the class tells
    is_plain = type(tensor) is nn.Parameter or hasattr(tensor, "full_tensor")
    if (
        not is_plain
        or tensor.is_meta
        or hasattr(tensor, "ds_id")
        or tensor.dtype not in FLOATING
        or tuple(tensor.shape) != shape
    ):
        raise ValueError(
            "weights that are quantised, offloaded or sharded (by ZeRO-3 or FSDP1) cannot be read here; load the "
            "checkpoint whole and in floating point first"
        )
    return gathered(tensor.detach())


def effective_weight(projection: nn.Module) -> Tensor:
    """W of a Linear, or W + scale * B A of every active LoRA adapter on it, as a merge would leave it.

    Raises:
        ValueError: another adapter, DoRA and its kin included, or a weight that `whole` refuses.
    """
    projection = running_module(projection)
    if isinstance(projection, nn.Linear):
        return whole(projection.weight, (projection.out_features, projection.in_features))
    if not hasattr(projection, "lora_A"):
        raise adapter_error(projection)
    weight = effective_weight(projection.base_layer)
    # Beside a merged adapter none other runs
    if not projection.disable_adapters and not projection.merged:
        for name in (name for name in projection.active_adapters if name in projection.lora_A):
            if name in projection.lora_variant or projection.lora_bias.get(name):
                raise adapter_error(projection)
            weight = (weight + gathered(projection.get_delta_weight(name))).to(weight.dtype)
    return weight


def effective_bias(projection: nn.Module) -> Tensor | None:
    projection = running_module(projection)
    if hasattr(projection, "base_layer"):
        return effective_bias(projection.base_layer)
    return None if projection.bias is None else whole(projection.bias, (projection.out_features,))


def adapter_error(module: nn.Module) -> ValueError:
    return ValueError(
        f"c cannot be computed under this adapter ({type(module).__name__}, not plain LoRA); merge it first "
        "(merge_and_unload)"
    )


def constants_from_weights(layers: nn.ModuleList, config: BHyTLlamaConfig) -> dict[int, float]:
    """c of "uniform_attention" or "published" for each layer that estimates ("fitted" begins with the former).

    Raises:
        ValueError: weights that are not plain numbers here.
    """
    constants = {}
    for layer_idx in config.estimated_layers:
        try:
            constants[layer_idx] = constant_from_weights(layers[layer_idx], config)
        except ValueError as error:
            raise ValueError(f"layer {layer_idx}: {error}") from None
    return constants


@torch.no_grad()
def constant_from_weights(layer: nn.Module, config: BHyTLlamaConfig) -> float:
    """c of "uniform_attention" or "published" for one block, as `constants_from_weights`."""
    attention, norm = layer.self_attn, running_module(layer.input_layernorm)
    if not isinstance(norm, (BHyT, RMSNormSite)):
        raise adapter_error(norm)
    refined = {}
    if config.second_site_estimator != "published":
        refined = {
            "gamma": whole(norm.weight, (config.hidden_size,)),
            "value_bias": effective_bias(attention.v_proj),
            "output_bias": effective_bias(attention.o_proj),
        }
    return attention_variance(
        effective_weight(attention.v_proj),
        effective_weight(attention.o_proj),
        attention.head_dim,
        strength=whole(norm.lam, (1,)).item() / norm.kappa if isinstance(norm, BHyT) else 1.0,
        context_length=config.variance_context_length,
        **refined,
    )
