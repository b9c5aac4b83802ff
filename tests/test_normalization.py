"""The norms as mathematics: against the float64 oracle, at the edges of every dtype, and as plain modules."""

import inspect
import math

import oracle
import pytest
import torch
from conftest import tiny_llama
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from modeling_bhyt import BHyT, BHyTStar, DyT, normalization_bhyt
from modeling_bhyt.normalization_bhyt import (
    BHyTSite,
    BHyTStarSite,
    DyTSite,
    EmbeddingScale,
    EstimatingBHyTSite,
    EstimatingRMSNormSite,
    EstimatingSite,
    RMSNormSite,
    attention_variance,
    mean_square,
)


KAPPA, EPS = 4.0, 1e-2
BOUNDED = {"lam": 1.7, "kappa": KAPPA, "eps": EPS}


def estimated(module, ms):
    return oracle.estimate(ms, module.variance_ratio, module.variance_offset)


# name: (module for D channels, the same by the oracle from the module's parameters)
NORMS = {
    "BHyT": (lambda d: BHyT(d, **BOUNDED), lambda m, x, ms: oracle.bhyt(x, m.weight, m.lam, KAPPA, EPS)),
    "BHyTSite": (lambda d: BHyTSite(d, **BOUNDED), lambda m, x, ms: oracle.bhyt(x, m.weight, m.lam, KAPPA, EPS)),
    "EstimatingBHyTSite": (
        lambda d: EstimatingBHyTSite(d, **BOUNDED, learnable_variance=True),
        lambda m, x, ms: oracle.bhyt(x, m.weight, m.lam, KAPPA, EPS, estimated(m, ms)),
    ),
    "BHyTStar": (lambda d: BHyTStar(d, **BOUNDED), lambda m, x, ms: oracle.bhyt_star(x, m.weight, m.lam, KAPPA, EPS)),
    "BHyTStarSite": (
        lambda d: BHyTStarSite(d, **BOUNDED),
        lambda m, x, ms: oracle.bhyt_star(x, m.weight, m.lam, KAPPA, EPS),
    ),
    "DyT": (lambda d: DyT(d, 0.8), lambda m, x, ms: oracle.dyt(x, m.weight, m.bias, m.alpha)),
    "DyTSite": (lambda d: DyTSite(d, 0.8), lambda m, x, ms: oracle.dyt(x, m.weight, m.bias, m.alpha)),
    "RMSNormSite": (lambda d: RMSNormSite(d, EPS), lambda m, x, ms: oracle.rmsnorm(x, m.weight, EPS)),
    "RMSNormSite of LNS": (
        lambda d: RMSNormSite(d, EPS, scale=1 / math.sqrt(3)),
        lambda m, x, ms: oracle.lns(x, m.weight, EPS, layer_number=3),
    ),
    "EstimatingRMSNormSite": (
        lambda d: EstimatingRMSNormSite(d, EPS, learnable_variance=True),
        lambda m, x, ms: oracle.rmsnorm(x, m.weight, EPS, estimated(m, ms)),
    ),
    "EmbeddingScale": (EmbeddingScale, lambda m, x, ms: m.scale.double() * x.double()),
}
TANH_NORMS = [name for name in NORMS if "RMSNorm" not in name and name != "EmbeddingScale"]
BHYT_NORMS = [name for name in TANH_NORMS if "DyT" not in name]
SITES = [name for name in NORMS if "Site" in name]


def make(name, size=16, shaken=True, dtype=torch.float32):
    module = NORMS[name][0](size)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters() if shaken else ():
            parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator).abs() + 0.1)
    return module.to(dtype)


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.3


def output(module, x, ms=None):
    """y of any of the norms; estimating sites are given the input's own mean square where no other is named."""
    if isinstance(module, EstimatingSite):
        return module(x, mean_square(x) if ms is None else ms)[0]
    y = module(x)
    return y[0] if isinstance(y, tuple) else y


@pytest.mark.parametrize("name", NORMS)
def test_norm_equals_oracle_in_fp64_and_fp32(name):
    x, ms = draw(2, 5, 16), draw(2, 5, 1, seed=2).abs()
    double = make(name, dtype=torch.float64)
    torch.testing.assert_close(output(double, x, ms), NORMS[name][1](double, x, ms), rtol=1e-13, atol=1e-14)
    single = make(name)
    y = output(single, x.float(), ms.float())
    torch.testing.assert_close(y.double(), NORMS[name][1](single, x.float(), ms.float()), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norm_in_half_precision_is_the_oracle_rounded_once(name, dtype):
    x, ms = draw(2, 5, 16).to(dtype), draw(2, 5, 1, seed=2).abs().float()
    module = make(name, dtype=dtype)
    # One rounding at the end; Llama's RMSNorm rounds before its gain as well
    rtol = (0.51 if name in TANH_NORMS else 1.02) * torch.finfo(dtype).eps
    expected = NORMS[name][1](module, x, ms)
    torch.testing.assert_close(output(module, x, ms).double(), expected, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize("name", NORMS)
def test_gradients_equal_finite_differences_and_the_oracle(name):
    module = make(name, size=6, dtype=torch.float64)
    x, ms = draw(2, 2, 6).requires_grad_(), draw(2, 2, 1, seed=2).abs().requires_grad_()
    names, parameters = zip(*module.named_parameters())
    if not isinstance(module, EstimatingSite):
        ms.requires_grad_(False)

    def run(x, ms, *parameters):
        inputs = (x, ms) if isinstance(module, EstimatingSite) else (x,)
        y = torch.func.functional_call(module, dict(zip(names, parameters)), inputs)
        return y[0] if isinstance(y, tuple) else y

    assert torch.autograd.gradcheck(run, (x, ms, *parameters))
    wanted = [tensor for tensor in (x, ms, *parameters) if tensor.requires_grad]
    weights = draw(2, 2, 6, seed=3)
    ours = torch.autograd.grad((run(x, ms, *parameters) * weights).sum(), wanted)
    theirs = torch.autograd.grad((NORMS[name][1](module, x, ms) * weights).sum(), wanted)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", SITES)
def test_site_hands_on_its_own_mean_square_or_none(name):
    module, x, foreign = make(name), draw(2, 5, 16).float(), torch.full((2, 5, 1), 99.0)
    y, ms = module(x, foreign)
    if name in ("BHyTSite", "RMSNormSite", "RMSNormSite of LNS"):
        torch.testing.assert_close(ms.double(), oracle.mean_square(x), rtol=1e-6, atol=0)
        assert torch.equal(y, module(x)[0])
    else:
        assert ms is None


@pytest.mark.parametrize("name", NORMS)
def test_norm_looks_at_one_token_at_a_time(name):
    module, x = make(name), draw(3, 7, 16).float()
    y = output(module, x)
    assert torch.equal(output(module, x[1:2, 4:5]), y[1:2, 4:5])
    assert torch.equal(output(module, x.flip(1)), y.flip(1))
    assert torch.equal(output(module, x[:, None])[:, 0], y)


@pytest.mark.parametrize("name", BHYT_NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_output_stays_within_gamma_for_any_input(name, dtype):
    largest = torch.finfo(dtype).max
    rows = [draw(16) * scale for scale in (1e-30, 1e-8, 1e-3, 1, 1e4, 6e4, 1e10, 1e20, 1e37)]
    rows += [torch.full((16,), sign * largest, dtype=torch.float64) for sign in (1, -1)]
    rows += [torch.eye(16, dtype=torch.float64)[3] * largest, torch.tensor([1.0, -1.0] * 8).double() * largest]
    x = torch.stack(rows).clamp(-largest, largest).to(dtype)
    for lam in (1e-3, 1.7, 1e4):
        module = make(name, dtype=dtype)
        with torch.no_grad():
            module.lam.fill_(lam)
            module.weight[::3].neg_()
        for ms in (mean_square(x), torch.zeros(len(x), 1), torch.full((len(x), 1), 1e30)):
            y = output(module, x, ms)
            assert y.isfinite().all()
            assert (y.abs() <= module.weight.abs()).all()


@pytest.mark.parametrize("name", [name for name in NORMS if name != "EmbeddingScale"])
def test_fp16_extremes_stay_finite_and_near_fp32(name):
    """Squares of 6e4 overflow fp16, squares of 1e-4 underflow it, and a zero row has no direction."""
    spike = torch.tensor([1e4, -6e4] + [0.0] * 14)
    rows = torch.stack([spike, torch.full((16,), 6e4), torch.zeros(16), draw(16).float() * 1e-4]).half()
    half, single = make(name, shaken=False, dtype=torch.float16), make(name, shaken=False)
    half.eps = single.eps = 1e-6
    x = rows.clone().requires_grad_()
    y = output(half, x)
    assert y.dtype == torch.float16 and y.isfinite().all()
    torch.testing.assert_close(y.float(), output(single, rows.float()), rtol=1e-2, atol=1e-7)
    assert (y[2] == 0).all()
    y.sum().backward()
    # The true slope of c at such rows, about eps^-1.5, is beyond fp16; a frozen c has none
    finite = [parameter for name, parameter in half.named_parameters() if name != "variance_offset"]
    assert all(tensor.grad.isfinite().all() for tensor in (x, *finite))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", NORMS)
def test_output_has_the_dtype_of_the_input(name, dtype):
    assert output(make(name, dtype=dtype), draw(2, 16).to(dtype)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_autocast_changes_nothing(name, dtype):
    module, x = make(name), draw(2, 16).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        y = output(module, x)
    assert torch.equal(y, output(module, x))
    if name in TANH_NORMS:
        assert y.dtype == dtype
    if name == "RMSNormSite":
        llama = LlamaRMSNorm(16, EPS)
        llama.load_state_dict(module.state_dict())
        assert y.dtype == llama(x).dtype and torch.equal(y, llama(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_are_fp32_for_half_inputs(dtype):
    x = torch.full((1, 16), 6e4, dtype=dtype)
    assert mean_square(x).dtype == torch.float32
    torch.testing.assert_close(mean_square(x).double(), oracle.mean_square(x), rtol=1e-6, atol=0)
    assert BHyTSite(16).to(dtype)(x)[1].dtype == torch.float32
    assert mean_square(x.double()).dtype == torch.float64


@pytest.mark.parametrize("name", TANH_NORMS)
def test_saturated_unit_has_a_finite_gradient(name):
    module = make(name)
    with torch.no_grad():
        getattr(module, "alpha" if "DyT" in name else "lam").fill_(1e6)
    x = (draw(2, 16).float() * 100).requires_grad_()
    y = output(module, x)
    assert ((y - getattr(module, "bias", 0)).abs() / module.weight > 0.999).all()
    y.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (x, *module.parameters()))


@pytest.mark.parametrize("norm", [BHyT, BHyTStar, BHyTSite, BHyTStarSite, EstimatingBHyTSite, EstimatingRMSNormSite])
def test_frozen_numbers_get_no_gradient_even_where_it_is_asked_for(norm):
    module = norm(16) if norm is EstimatingRMSNormSite else norm(16, learnable_lambda=False)
    frozen = [parameter for name, parameter in module.named_parameters() if name != "weight"]
    assert frozen and not any(parameter.requires_grad for parameter in frozen)
    for parameter in frozen:
        parameter.requires_grad_(True)
    output(module, draw(2, 16).float()).sum().backward()
    assert all(parameter.grad is None for parameter in frozen)
    assert module.weight.grad is not None


@pytest.mark.parametrize("norm", [EstimatingBHyTSite, EstimatingRMSNormSite])
@pytest.mark.parametrize("value", [-0.5, 0.0, 0.5])
def test_learnable_variance_is_never_negative_and_always_gets_a_gradient(norm, value):
    module = norm(16, learnable_variance=True)
    for number in (module.variance_ratio, module.variance_offset):
        nn.init.constant_(number, value)
    ms = torch.tensor([[0.0], [0.1], [7.0]])
    estimate = module.estimate(ms)
    # At ms = 0 the estimate is c, and its slope is r
    assert (estimate >= 0).all() and (estimate.diff(dim=0) >= 0).all()
    output(module, draw(3, 16).float(), ms).pow(2).sum().backward()
    for number in (module.variance_ratio, module.variance_offset):
        assert number.grad.isfinite().all() and number.grad.abs() > 0


@pytest.mark.parametrize("num_value_heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("biased", [False, True])
def test_attention_variance_equals_oracle(num_value_heads, biased):
    num_heads, head_size, hidden_size = 4, 6, 16
    w_v, w_o = draw(num_value_heads * head_size, hidden_size), draw(hidden_size, num_heads * head_size, seed=2)
    gamma = draw(hidden_size, seed=3)
    biases = (draw(len(w_v), seed=4), draw(hidden_size, seed=5)) if biased else (None, None)
    ours = attention_variance(w_v, w_o, head_size, 0.3, 128, gamma, *biases)
    theirs = oracle.uniform_attention(w_v, w_o, num_heads, head_size, 0.3, 128, gamma, *biases)
    assert ours == pytest.approx(theirs.item(), rel=1e-12)
    published = attention_variance(w_v, w_o, head_size, 0.3, 128)
    assert published == pytest.approx(oracle.equation_3(w_v, w_o, num_heads, head_size, 0.3, 128).item(), rel=1e-12)
    assert published == pytest.approx(attention_variance(w_v, w_o, head_size, 0.3, 128, torch.ones(hidden_size)))


@pytest.mark.parametrize("biased", [False, True])
def test_attention_variance_is_what_uniform_attention_adds_to_gaussian_states(biased):
    num_heads, num_value_heads, head_size, hidden_size, num_tokens = 4, 2, 8, 32, 16
    w_v, w_o = draw(num_value_heads * head_size, hidden_size), draw(hidden_size, num_heads * head_size, seed=2)
    norm = BHyT(hidden_size, lam=0.2).double()
    norm.weight = nn.Parameter(draw(hidden_size, seed=3))
    b_v, b_o = (draw(len(w_v), seed=4) * 0.02, draw(hidden_size, seed=5) * 0.02) if biased else (None, None)
    states = torch.randn(4000, num_tokens, hidden_size, generator=torch.Generator().manual_seed(6)).double()
    values = nn.functional.linear(norm(states), w_v, b_v).mean(1).unflatten(1, (num_value_heads, head_size))
    attention = nn.functional.linear(values.repeat_interleave(num_heads // num_value_heads, 1).flatten(1), w_o, b_o)
    expected = attention_variance(w_v, w_o, head_size, 0.2 / norm.kappa, num_tokens, norm.weight.detach(), b_v, b_o)
    assert attention.pow(2).mean().item() == pytest.approx(expected, rel=0.03)


def test_no_class_has_a_name_that_serving_engines_exchange():
    classes = [c for _, c in inspect.getmembers(normalization_bhyt, inspect.isclass) if c.__module__.endswith("_bhyt")]
    assert len(classes) > 10
    assert not [c.__name__ for c in classes if c.__name__.endswith("RMSNorm")]


@pytest.mark.parametrize("norm", [BHyT, BHyTStar, DyT])
def test_plain_module_drops_into_another_model_and_trains(norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), norm(16), nn.Linear(16, 1))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    x = draw(32, 8).float()
    losses = []
    for _ in range(5):
        loss = (model(x) - x[:, :1]).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(not torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_bhyt_replaces_the_norms_of_a_plain_llama(token_ids):
    model = tiny_llama()
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = BHyT(64), BHyT(64)
    model(token_ids, labels=token_ids).loss.backward()
    assert model.model.layers[0].input_layernorm.lam.grad.abs() > 0
