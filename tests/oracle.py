"""Every norm, the estimator's constants and the whole model once more: float64, one line an equation, no shared code.

Written from the equations of arXiv 2601.09719 (BHyT), 2502.02732 (Peri-LN), 2502.05795 (LNS) and 2503.10622 (DyT).
Only attention and MLP are transformers' own modules, cast to float64.
"""

import copy
import math

import torch


def mean_square(x):
    return (x.double() ** 2).sum(-1, keepdim=True) / x.shape[-1]


def bhyt(x, gamma, lam, kappa, eps, ms=None):
    """Equation 2; `ms` takes the place of the input's own mean square."""
    s = torch.sqrt((mean_square(x) if ms is None else ms.double()) + eps)
    return gamma.double() * torch.tanh(lam.double() * x.double() / (kappa * s))


def bhyt_star(x, gamma, lam, kappa, eps):
    """Equation 1 with the population standard deviation sqrt(var + eps)."""
    x = x.double()
    mu = x.sum(-1, keepdim=True) / x.shape[-1]
    s = torch.sqrt(((x - mu) ** 2).sum(-1, keepdim=True) / x.shape[-1] + eps)
    return gamma.double() * torch.tanh(lam.double() * x / (kappa * s + abs(mu)))


def rmsnorm(x, gamma, eps, ms=None):
    ms = mean_square(x) if ms is None else ms.double()
    return gamma.double() * x.double() / torch.sqrt(ms + eps)


def lns(x, gamma, eps, layer_number):
    """LayerNorm Scaling; layers are numbered from 1."""
    return rmsnorm(x, gamma, eps) / math.sqrt(layer_number)


def dyt(x, gamma, beta, alpha):
    return gamma.double() * torch.tanh(alpha.double() * x.double()) + beta.double()


def estimate(ms, r, c):
    return r.double() * ms.double() + c.double()


def full_value_weight(value_weight, num_heads, head_size):
    """W_V as grouped-query attention uses it: each value head repeated for the query heads that share it."""
    heads = value_weight.double().reshape(-1, head_size, value_weight.shape[-1])
    return heads.repeat_interleave(num_heads // heads.shape[0], 0).reshape(num_heads * head_size, -1)


def equation_3(value_weight, output_weight, num_heads, head_size, strength, context_length):
    """||W_V W_O||_F^2 / (T d) * strength^2, strength = lambda / kappa."""
    product = output_weight.double() @ full_value_weight(value_weight, num_heads, head_size)
    return (product**2).sum() * strength**2 / (context_length * product.shape[0])


def uniform_attention(
    value_weight,
    output_weight,
    num_heads,
    head_size,
    strength,
    context_length,
    gamma,
    value_bias=None,
    output_bias=None,
):
    """Equation 3 with gamma where it belongs, and what biases add: they are equal in all tokens, so no T divides them."""
    w_v, w_o = full_value_weight(value_weight, num_heads, head_size), output_weight.double()
    spread = ((w_o @ w_v @ torch.diag(gamma.double())) ** 2).sum() * strength**2 / (context_length * len(gamma))
    shift = torch.zeros(len(gamma), dtype=torch.float64)
    if value_bias is not None:
        shift += w_o @ full_value_weight(value_bias[:, None], num_heads, head_size)[:, 0]
    if output_bias is not None:
        shift += output_bias.double()
    return spread + (shift**2).mean()


def model_constant(model, layer_index):
    """c of one layer of a BHyT model, from its configuration and its present weights."""
    config, layer = model.config, model.base_model.layers[layer_index]
    strength = layer.input_layernorm.lam.double().item() / config.kappa if config.norm_type == "bhyt" else 1.0
    attention, gamma = layer.self_attn, layer.input_layernorm.weight
    common = (
        attention.v_proj.weight.detach(),
        attention.o_proj.weight.detach(),
        config.num_attention_heads,
        config.head_dim,
        strength,
        config.variance_context_length,
    )
    if config.variance_estimator == "published":
        return equation_3(*common).item()
    biases = (None if b is None else b.detach() for b in (attention.v_proj.bias, attention.o_proj.bias))
    return uniform_attention(*common, gamma.detach(), *biases).item()


def site(config, tensors, prefix, x, layer_index=0, ms=None):
    """One norm of the model; `ms`: the mean square of the block's input where the site estimates, else None."""
    kappa, eps, gamma = config.kappa, config.rms_norm_eps, tensors[prefix + "weight"]
    if ms is not None:
        ms = estimate(ms, tensors[prefix + "variance_ratio"], tensors[prefix + "variance_offset"])
    match config.norm_type:
        case "bhyt":
            return bhyt(x, gamma, tensors[prefix + "lam"], kappa, eps, ms)
        case "bhyt_star":
            return bhyt_star(x, gamma, tensors[prefix + "lam"], kappa, eps)
        case "dyt":
            return dyt(x, gamma, tensors[prefix + "bias"], tensors[prefix + "alpha"])
        case "lns":
            return lns(x, gamma, eps, layer_index + 1)
        case "rmsnorm" | "peri_ln":
            return rmsnorm(x, gamma, eps, ms)


def estimates(config, layer_index):
    default = "uniform_attention" if config.norm_type == "bhyt" else "exact"
    return (config.variance_estimator or default) != "exact" and layer_index not in config.exact_variance_layers


def whole_model(model, token_ids):
    """Logits (B, T, V) of a causal BHyT model and the states between its blocks, each (B, T, D)."""
    model = copy.deepcopy(model).double()
    config, base = model.config, model.base_model
    tensors = {name: tensor.detach() for name, tensor in base.state_dict().items()}
    x = tensors["embed_tokens.weight"][token_ids]
    if config.norm_type == "dyt":
        x = tensors["embed_norm.scale"] * x
    positions = torch.arange(token_ids.shape[1])[None]
    # Without a mask transformers' sdpa attention is causal; eager attention would round its softmax to fp32
    run = {"position_embeddings": base.rotary_emb(x, positions), "attention_mask": None}
    states = [x]
    for index, layer in enumerate(base.layers):
        prefix = f"layers.{index}."
        block_input = x
        update, _ = layer.self_attn(site(config, tensors, prefix + "input_layernorm.", x, index), **run)
        if config.norm_type == "peri_ln":
            update = rmsnorm(update, tensors[prefix + "attention_output_layernorm.weight"], config.rms_norm_eps)
        x = x + update
        ms = mean_square(block_input) if estimates(config, index) else None
        update = layer.mlp(site(config, tensors, prefix + "post_attention_layernorm.", x, index, ms))
        if config.norm_type == "peri_ln":
            update = rmsnorm(update, tensors[prefix + "mlp_output_layernorm.weight"], config.rms_norm_eps)
        x = x + update
        states.append(x)
    if config.norm_type == "dyt" or config.final_lambda is not None:
        x = site(config, tensors, "norm.", x)
    else:
        x = rmsnorm(x, tensors["norm.weight"], config.rms_norm_eps)
    return x @ model.lm_head.weight.detach().T, states
