# Copyright 2026 The bhyt authors. Licensed under the Apache License, Version 2.0.
"""The mathematics of the norms: pure functions first, then the modules around them.

Symbols (arXiv 2601.09719, whose equation numbers are used below)

    x       hidden state of a token, D channels         shape (B, T, D)
    ms      mean of x^2 over the channels               shape (B, T, 1), fp32
    gamma   gain after the tanh, starts at 1            shape (D,)
    lam     lambda, half-width of the linear interval   shape (1,)
    kappa   how many standard deviations stay inside    number, 10
    eps     added to a variance under the root          number
    r, c    estimator of the second site, r ms + c      shape (1,) each

    B batch, T tokens, D hidden size.

The functions compute in the precision of the x that they get. The modules bring x to full precision first (fp32, or
fp64 for fp64), once, so that its gradient is rounded once, and return the input's dtype (RMSNorm: what Llama's returns).
No function looks at more than one token, and no module keeps state between calls.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def in_full_precision(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def mean_square(x: Tensor) -> Tensor:
    """ms(x) = mean of x^2 over the channels. (B, T, D) -> (B, T, 1), at least fp32: the square of 256 overflows fp16."""
    return in_full_precision(x).pow(2).mean(-1, keepdim=True)


def bhyt(x: Tensor, gamma: Tensor, lam: Tensor, kappa: float, ms: Tensor, eps: float) -> Tensor:
    """Equation 2: y = gamma * tanh(lam / (kappa * sqrt(ms + eps)) * x), so that |y| <= |gamma| in every channel."""
    # Divided by a root, not multiplied by a reciprocal root: serving engines rewrite that pattern into RMSNorm
    slope = lam / (kappa * torch.sqrt(ms + eps))
    return gamma * torch.tanh(slope * x)


def bhyt_star(x: Tensor, gamma: Tensor, lam: Tensor, kappa: float, eps: float) -> Tensor:
    """Equation 1: y = gamma * tanh(lam / (kappa * s + |mu|) * x), with x's mean mu and s = sqrt(var(x) + eps)."""
    variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
    slope = lam / (kappa * torch.sqrt(variance + eps) + mean.abs())
    return gamma * torch.tanh(slope * x)


def dyt(x: Tensor, gamma: Tensor, beta: Tensor, alpha: Tensor) -> Tensor:
    """Dynamic Tanh (arXiv 2503.10622): y = gamma * tanh(alpha * x) + beta. No statistics."""
    return gamma * torch.tanh(alpha * x) + beta


def rms_norm(x: Tensor, gamma: Tensor, ms: Tensor, eps: float, scale: float, dtype: torch.dtype) -> Tensor:
    """y = gamma * scale * x / sqrt(ms + eps), operation by operation as transformers' Llama computes it.

    scale = 1 / sqrt(l), l the layer's number from 1, makes it LayerNorm Scaling (arXiv 2502.05795). Like Llama, it
    rounds to `dtype` before the gain.
    """
    return gamma * (x * (torch.rsqrt(ms + eps) * scale)).to(dtype)


def attention_variance(
    value_weight: Tensor,
    output_weight: Tensor,
    head_size: int,
    strength: float,
    context_length: int,
    gamma: Tensor | None = None,
    value_bias: Tensor | None = None,
    output_bias: Tensor | None = None,
) -> float:
    """c of the second site, ms(x + attention) = ms(x) + c: what attention adds if its weights are uniform.

    c = ||W_O W_V diag(gamma)||_F^2 * strength^2 / (T D) + ||W_O b_V + b_O||^2 / D

    Equation 3 of the paper is the first term at gamma = 1. The mean of T independent values shrinks their variance by
    T; biases are the same in every value and do not shrink. W_V is repeated to the full head count first; here the
    columns of W_O that read the same value head are added up instead, which is the same product.

    Args:
        value_weight: W_V, (K * head_size, D) with K key-value heads.
        output_weight: W_O, (D, H * head_size) with H query heads, a multiple of K.
        strength: standard deviation of the first site's output at gamma = 1: lam / kappa for BHyT, 1 for RMSNorm.
        context_length: T in tokens, a constant of the checkpoint.
    """
    hidden_size, num_value_features = output_weight.shape[0], value_weight.shape[0]
    num_value_heads = num_value_features // head_size

    def add_shared_heads(weight: Tensor) -> Tensor:
        return weight.double().view(hidden_size, num_value_heads, -1, head_size).sum(2).flatten(1)

    w_o, w_v = add_shared_heads(output_weight), value_weight.double()
    scaled_w_v = w_v if gamma is None else w_v * gamma.double()
    # ||A B||_F^2 = tr(A^T A B B^T): two small Gram matrices instead of a D x D product
    squared_norm = ((w_o.T @ w_o) * (scaled_w_v @ scaled_w_v.T)).sum()
    variance = squared_norm * strength**2 / (context_length * hidden_size)
    shift = w_o.new_zeros(hidden_size)
    if value_bias is not None:
        shift = shift + w_o @ value_bias.double()
    if output_bias is not None:
        shift = shift + output_bias.double()
    return (variance + shift.pow(2).mean()).item()


def fit_sums(block_input: Tensor, second_site: Tensor) -> Tensor:
    """All that `fit_ratio_and_offset` needs to know of tokens: five sums, fp64 (5,), which add up over batches.

    Args:
        block_input: m = ms(x) of the block's input, one a token, of any shape.
        second_site: m' = ms(x') of the second site's input for the same tokens.
    """
    block_input, second_site = block_input.double(), second_site.double()
    a, b = block_input / second_site, 1 / second_site
    return torch.stack([(a * a).sum(), (a * b).sum(), (b * b).sum(), a.sum(), b.sum()])


def fit_ratio_and_offset(sums: Tensor) -> tuple[float, float]:
    """r, c >= 0 that minimise sum(((r m + c) / m' - 1)^2): non-negative least squares on the relative error.

    With two unknowns the solution is the free one if it is non-negative, else the better of the two edges.
    """
    aa, ab, bb, at, bt = sums
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        r, c = (bb * at - ab * bt) / determinant, (aa * bt - ab * at) / determinant
        if r >= 0 and c >= 0:
            return r.item(), c.item()
    # What an edge takes off the sum of squares that is there at r = c = 0
    if at * at / aa >= bt * bt / bb:
        return (at / aa).item(), 0.0
    return 0.0, (bt / bb).item()


# Plain modules, for any model: one tensor in, one tensor out.


class BHyT(nn.Module):
    """Bounded Hyperbolic Tanh, equation 2 of arXiv 2601.09719: y = gamma * tanh(lam / (kappa * sqrt(ms(x) + eps)) * x).

    A replacement for RMSNorm in any model; (..., D) -> (..., D), |y| <= |gamma|. `weight` is gamma, `lam` is lambda.
    """

    def __init__(
        self,
        hidden_size: int,
        lam: float = 1.0,
        kappa: float = 10.0,
        eps: float = 1e-6,
        learnable_lambda: bool = True,
    ):
        super().__init__()
        self.kappa, self.eps = kappa, eps
        self.learnable_lambda = learnable_lambda
        self.initial_values = {"weight": 1.0, "lam": lam}
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.lam = nn.Parameter(torch.full((1,), float(lam)), requires_grad=learnable_lambda)

    @property
    def effective_lambda(self) -> Tensor:
        return self.lam if self.learnable_lambda else self.lam.detach()

    def normalize(self, x: Tensor, ms: Tensor, dtype: torch.dtype) -> Tensor:
        """y in `dtype`, for x in full precision."""
        return bhyt(x, self.weight, self.effective_lambda, self.kappa, ms, self.eps).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        full = in_full_precision(x)
        return self.normalize(full, mean_square(full), x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, kappa={self.kappa}, eps={self.eps}, learnable_lambda={self.learnable_lambda}"


class BHyTStar(BHyT):
    """Identical to BHyT except: equation 1, with the standard deviation about the mean, and the mean."""

    def normalize(self, x: Tensor, ms: Tensor | None, dtype: torch.dtype) -> Tensor:
        return bhyt_star(x, self.weight, self.effective_lambda, self.kappa, self.eps).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(in_full_precision(x), None, x.dtype)


class DyT(nn.Module):
    """Dynamic Tanh (arXiv 2503.10622): y = gamma * tanh(alpha * x) + beta; `weight` is gamma, `bias` is beta."""

    def __init__(self, hidden_size: int, alpha: float = 0.5):
        super().__init__()
        self.initial_values = {"weight": 1.0, "bias": 0.0, "alpha": alpha}
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size))
        self.alpha = nn.Parameter(torch.full((1,), float(alpha)))

    def normalize(self, x: Tensor, ms: Tensor | None, dtype: torch.dtype) -> Tensor:
        return dyt(x, self.weight, self.bias, self.alpha).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(in_full_precision(x), None, x.dtype)

    def extra_repr(self) -> str:
        return str(self.weight.shape[0])


class EmbeddingScale(nn.Module):
    """The learned number after the embedding that DyT needs in language models; starts at sqrt(D) (its paper, sec. 5)."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.initial_values = {"scale": hidden_size**0.5}
        self.scale = nn.Parameter(torch.full((1,), hidden_size**0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


# The sites of a block: norm(x, mean_square=None) -> (y, mean square of x or None). The statistic travels as a value.


class ReducingSite:
    """A site that measures its own mean square and hands it on."""

    normalize: Callable[..., Tensor]

    def forward(self, x: Tensor, ms: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        full = in_full_precision(x)
        ms = mean_square(full)
        return self.normalize(full, ms, x.dtype), ms


class EstimatingSite(nn.Module):
    """A site that reduces nothing: it normalises by r * ms + c, ms being the mean square of the block's input.

    r (`variance_ratio`) and c (`variance_offset`) are constants of the checkpoint: frozen, unless `learnable_variance`.
    Trained, they are reflected at 0, which keeps both from turning negative without ever blocking their gradient.
    """

    def __init__(self, *args, learnable_variance: bool = False, **kwargs):
        super().__init__(*args, **kwargs)
        self.learnable_variance = learnable_variance
        self.initial_values |= {"variance_ratio": 1.0, "variance_offset": 0.0}
        self.variance_ratio = nn.Parameter(torch.ones(1), requires_grad=learnable_variance)
        self.variance_offset = nn.Parameter(torch.zeros(1), requires_grad=learnable_variance)

    def estimate(self, ms: Tensor) -> Tensor:
        r, c = self.variance_ratio, self.variance_offset
        if not self.learnable_variance:
            r, c = r.detach(), c.detach()
        return torch.where(r < 0, -r, r) * ms + torch.where(c < 0, -c, c)

    def forward(self, x: Tensor, ms: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.normalize(in_full_precision(x), self.estimate(ms), x.dtype), None


class SiteWithoutMeanSquare:
    """A site whose norm needs no mean square, or statistics that no other site can use."""

    normalize: Callable[..., Tensor]

    def forward(self, x: Tensor, ms: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self.normalize(in_full_precision(x), None, x.dtype), None


class RootMeanSquare(nn.Module):
    """Base of the RMSNorm sites: y = gamma * scale * x / sqrt(ms + eps)."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, scale: float = 1.0):
        super().__init__()
        self.eps, self.scale = eps, scale
        self.initial_values = {"weight": 1.0}
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def normalize(self, x: Tensor, ms: Tensor, dtype: torch.dtype) -> Tensor:
        return rms_norm(x, self.weight, ms, self.eps, self.scale, dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}, scale={self.scale:.4g}"


# Sites return a pair where the plain modules return a tensor: the one point in which they differ from their parents


class BHyTSite(ReducingSite, BHyT):
    pass


class EstimatingBHyTSite(EstimatingSite, BHyT):  # type: ignore[misc]
    pass


class BHyTStarSite(SiteWithoutMeanSquare, BHyTStar):
    pass


class DyTSite(SiteWithoutMeanSquare, DyT):
    pass


# No class here may be called *RMSNorm: serving engines exchange such modules by name for their own, with one input


class RMSNormSite(ReducingSite, RootMeanSquare):
    pass


class EstimatingRMSNormSite(EstimatingSite, RootMeanSquare):
    pass
