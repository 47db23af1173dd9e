"""What rounding to 16 bits takes from published pure-bf16 optimizers, and ours keeps; fp32 arithmetic is the truth."""
from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ipu_lean.nn.norms import LayerNorm
from ipu_lean.optim import AnyPrecisionAdamW, native
from ipu_lean.optim.any_precision_rules import mix, noise_key, random_bits

pytestmark = pytest.mark.pod
BF16 = torch.bfloat16
COUNT = 100_000
KEPT = ("kahan", "split", "stochastic")


def build(parameter, **options):
    """In C where that can be: it rounds as eager code does, and is faster."""
    compiled = True if native.library()[0] is not None and parameter.dtype == BF16 else None
    return AnyPrecisionAdamW([parameter], **{"momentum_dtype": BF16, "betas": (0.9, 0.95), "compiled": compiled, **options})


def starts(spread):
    """1e5 ones; or, spread, all over two binades, so that every kind of rounding occurs."""
    return torch.linspace(0.5, 2.0, COUNT).to(BF16) if spread else torch.ones(COUNT, dtype=BF16)


def mean_after(start, gradient, steps, **options):
    """Mean of the elements after some steps under a constant gradient; and that of the fp32 path, the truth (every hundredth)."""
    means = []
    for dtype in (BF16, torch.float32):
        own = options if dtype == BF16 else {**options, "summation": "none", "momentum_dtype": torch.float32, "variance": "fp32"}
        values = start if dtype == BF16 else start[COUNT // 2000 :: COUNT // 1000]
        parameter = nn.Parameter(values.to(dtype, copy=True))
        optimizer = build(parameter, **own)
        parameter.grad = torch.full_like(parameter, gradient)
        for _ in range(steps):
            optimizer.step()
        means.append(float(parameter.detach().double().mean()))
    return tuple(means)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("summation", [*KEPT, "none"])
def test_weight_decay_is_not_swallowed(summation, spread):
    """lr x decay = 1e-4 is far below half a unit of bf16, 2^-9."""
    start = starts(spread)
    found, truth = mean_after(start, 0.0, 2000, lr=1e-3, weight_decay=0.1, summation=summation)
    assert truth == pytest.approx(0.8187 * float(start.double().mean()), rel=1e-3)
    if summation == "none":
        assert found == float(start.double().mean())  # not one of them has moved
    else:
        assert found == pytest.approx(truth, rel=0.01)


def test_published_decay_is_swallowed():
    """So the test above tests something: torchdistx's own order, with its compensation."""
    small = nn.Parameter(torch.ones(10, dtype=BF16))
    options = {"lr": 1e-3, "weight_decay": 0.1, "use_kahan_summation": True, "numerics": "published"}
    optimizer = build(small, **options)
    small.grad = torch.zeros_like(small)
    for _ in range(200):
        optimizer.step()
    assert torch.equal(small, torch.ones_like(small))


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("summation", [*KEPT, "none"])
def test_small_steps_do_not_stall(summation, spread):
    found, truth = mean_after(starts(spread), 1.0, 1000, lr=1e-4, summation=summation)
    if summation == "none":
        assert found == pytest.approx(float(starts(spread).double().mean()), rel=1e-3)  # it stalls
    else:
        assert found == pytest.approx(truth, rel=0.002)
        assert spread or truth == pytest.approx(0.9, rel=1e-4)


@pytest.mark.parametrize("variance,beta", [("auto", 0.999), ("stochastic", 0.999), ("auto", 0.95)])
def test_variance_follows_falling_gradients(variance, beta):
    """From 1 to 1e-4: the squares of gradients of 0.01 after gradients of 1."""
    parameter = nn.Parameter(torch.ones(COUNT if variance == "stochastic" else 100, dtype=BF16))  # else all alike
    more = {} if variance == "stochastic" else {"compiled": None}  # C has no fp32 variance
    optimizer = build(parameter, lr=0.0, betas=(0.9, beta), variance=variance, **more)
    steps = 3000 if beta == 0.999 else 300
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.state[parameter]["exp_avg_sq"].fill_(1.0)
    parameter.grad = torch.full_like(parameter, 0.01)
    truth = 1.0
    for _ in range(steps):
        optimizer.step()
        truth = beta * truth + (1 - beta) * float(parameter.grad[0]) ** 2
    state = optimizer.state[parameter]["exp_avg_sq"]
    assert float(state.double().mean()) == pytest.approx(truth, rel=0.05)
    assert state.dtype == (torch.float32 if (variance, beta) == ("auto", 0.999) else BF16)


@pytest.mark.parametrize("summation", [*KEPT, "none"])
def test_zero_and_tiny_gradients(summation):
    """eps = 0 divides zero by zero elsewhere; the square of 1e-25 is zero even in fp32. A step stays bounded by about lr."""
    values = torch.tensor([0.0, 1e-25, 1e-20, -1e-18, 1.0])
    parameter = nn.Parameter(torch.ones(5, dtype=BF16))
    optimizer = build(parameter, lr=0.01, eps=0.0, summation=summation)
    for _ in range(20):
        parameter.grad = values.to(BF16)
        optimizer.step()
    assert torch.isfinite(parameter).all()
    moved = (1 - parameter.detach().float()).abs()
    assert moved[0] == 0 and moved.max() <= 20 * 0.0125


@pytest.mark.parametrize("summation", KEPT)
def test_gains_of_a_norm_move(summation):
    """Gains begin at one, where bf16 is coarse: at lr 6e-4 none of them moves under plain rounding."""
    torch.manual_seed(0)
    norm = LayerNorm(768).to(BF16)
    optimizer = AnyPrecisionAdamW(norm.parameters(), lr=6e-4, betas=(0.9, 0.95), momentum_dtype=BF16, summation=summation)
    for _ in range(100):
        optimizer.zero_grad()
        x, y = torch.randn(2, 16, 768, dtype=BF16)
        ((norm(x) - y).float() ** 2).mean().backward()
        optimizer.step()
    share = float((norm.weight != 1).float().mean())
    assert share > 0.75


def test_stochastic_rounding_is_unbiased():
    """Mean of 1e5 roundings of a value a third between two neighbours, within four standard errors; just above a power of two,
    where the neighbours below lie closer, and elsewhere likewise.
    """
    for value in (1 + 2**-7 / 3, 1 + 2**-7 / 50, 1 - 2**-8 / 50, -(1 + 2**-7 / 3), 3e-5, 1e-30):
        truth = float(torch.tensor(value, dtype=torch.float32))
        parameter = nn.Parameter(torch.zeros(COUNT, dtype=BF16))
        optimizer = build(parameter, lr=abs(truth), betas=(0.0, 0.0), eps=0.0, summation="stochastic")
        parameter.grad = torch.full_like(parameter, -math.copysign(1.0, truth))
        optimizer.step()
        found = parameter.detach().double()
        unit = 2.0 ** (math.floor(math.log2(abs(truth))) - 7)
        assert set(found.tolist()) == {unit * math.floor(truth / unit), unit * math.ceil(truth / unit)}
        assert abs(float(found.mean()) - truth) < 4 * unit / 2 / COUNT**0.5


def test_random_bits():
    """Without a key the hash is a permutation; halves, neighbours and steps are independent as far as 1e5 draws show."""
    index = torch.arange(COUNT, dtype=torch.int32)
    plain = random_bits(index[:50], torch.zeros(2, dtype=torch.int32))
    assert [int(x) & 0xFFFFFFFF for x in plain] == [mix(i) for i in range(50)]

    def halves(seed, step, position=0):
        bits = random_bits(index, torch.tensor(noise_key(seed, step, position), dtype=torch.int32))
        return (bits & 0xFFFF).double() / 65536 - 0.5, ((bits >> 16) & 0xFFFF).double() / 65536 - 0.5

    low, high = halves(0, 1)
    bound = 5 / COUNT**0.5
    for one, other in ((low, high), (low[1:], low[:-1]), (low, halves(0, 2)[0]), (low, halves(1, 1)[0])):
        assert abs(float((one * other).mean())) * 12 < bound
    for part in (low, high):
        assert abs(float(part.mean())) * 12**0.5 < bound and abs(float(part.var()) * 12 - 1) < bound
    # A block that begins later draws what the whole would have drawn there.
    assert torch.equal(halves(0, 1, 1000)[0][:-1000], low[1000:])
