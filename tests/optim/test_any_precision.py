"""AnyPrecisionAdamW: torchdistx's numbers on request, torch's in fp32, and what its options mean and refuse."""
from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from ipu_lean import _compat
from ipu_lean.errors import ConfigError
from ipu_lean.mup import base_shapes_from_width, compute_roles
from ipu_lean.optim import AnyPrecisionAdamW, MuAdamW
from tests.mup.toy import Toy

pytestmark = pytest.mark.pod
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = ((33, 40), (7,), (64,), (2, 3, 5), ())


def parameters(dtype, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter((torch.rand(shape, generator=generator) * 2 - 1).to(dtype)) for shape in shapes]


def give_gradients(params, step, scale=1.0):
    """Gradients in which a half of the elements changes its sign, and whose size falls."""
    generator = torch.Generator().manual_seed(1000 + step)
    for number, p in enumerate(params):
        noise = torch.randn(p.shape, generator=generator)
        p.grad = ((noise + (number - 1)) * scale / (1 + step / 50)).to(p.dtype)


def run(optimizer, params, steps, start=0):
    for step in range(start, start + steps):
        give_gradients(params, step)
        optimizer.step()


class Published:
    """torchdistx 0.3.0.dev0's rule, written down once more: one rounding after each operation, in the order of its step()."""

    def __init__(self, params, lr, betas, eps, decay, kahan, m_type, v_type, c_type):
        self.params, self.lr, self.betas, self.eps, self.decay, self.kahan = params, lr, betas, eps, decay, kahan
        self.m = [torch.zeros(p.shape, dtype=m_type) for p in params]
        self.v = [torch.zeros(p.shape, dtype=v_type) for p in params]
        self.c = [torch.zeros(p.shape, dtype=c_type) for p in params]
        self.t = torch.tensor(0.0)

    def step(self):
        self.t = self.t + 1
        b1, b2 = self.betas
        rate = float(self.lr / (1 - torch.pow(b1, self.t)))
        correction = torch.pow(1 - torch.pow(b2, self.t), 0.5)
        for p, m, v, c in zip((p.data for p in self.params), self.m, self.v, self.c):
            g = next(q.grad for q in self.params if q.data_ptr() == p.data_ptr())
            if self.decay:
                p.copy_(p * (1 - self.lr * self.decay))
            m.copy_(torch.add((m * b1), g, alpha=1 - b1).to(m.dtype))
            v.copy_(v * b2)
            v.addcmul_(g, g, value=1 - b2)
            below = torch.sqrt(v) / correction
            below = below + self.eps
            if self.kahan:
                c.addcdiv_(m, below, value=-rate)
                old = p.clone()
                p.copy_(p + c)
                c.copy_(c + (old - p))
            else:
                p.addcdiv_(m, below, value=-rate)


@pytest.mark.parametrize(
    "weights,m_type,v_type,c_type,kahan",
    [
        *itertools.product((BF16, FP32), (BF16, FP32), (BF16, FP32), (BF16, FP32), (True,)),
        *itertools.product((BF16, FP32), (BF16, FP32), (BF16, FP32), (BF16,), (False,)),
    ],
)
def test_published_numbers_bit_for_bit(weights, m_type, v_type, c_type, kahan):
    shapes = ((13, 5), (7,))
    if len({weights, m_type, v_type, c_type}) > 1 and not _compat.mixes_types():
        options = {"momentum_dtype": m_type, "variance_dtype": v_type, "compensation_buffer_dtype": c_type}
        with pytest.raises(ConfigError, match="cannot mix types"):
            AnyPrecisionAdamW(parameters(weights, shapes), numerics="published", **options)
        return
    mine, theirs = parameters(weights, shapes), parameters(weights, shapes)
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
    optimizer = AnyPrecisionAdamW(
        mine,
        weight_decay=0.1,
        use_kahan_summation=kahan,
        momentum_dtype=m_type,
        variance_dtype=v_type,
        compensation_buffer_dtype=c_type,
        numerics="published",
        **settings,
    )
    reference = Published(theirs, decay=0.1, kahan=kahan, m_type=m_type, v_type=v_type, c_type=c_type, **settings)
    run(optimizer, mine, 200)
    with torch.no_grad():
        run(reference, theirs, 200)
    start = parameters(weights, shapes)
    for number, (a, b) in enumerate(zip(mine, theirs)):
        assert torch.equal(a, b) and not torch.equal(a, start[number])
        state = optimizer.state[a]
        assert torch.equal(state["exp_avg"], reference.m[number]) and state["exp_avg"].dtype == m_type
        assert torch.equal(state["exp_avg_sq"], reference.v[number]) and state["exp_avg_sq"].dtype == v_type
        assert not kahan or torch.equal(state["compensation"], reference.c[number])


@pytest.mark.parametrize("maximize", [False, True])
def test_fp32_is_torchs_adamw(maximize):
    mine, theirs = parameters(FP32), parameters(FP32)
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "maximize": maximize}
    run(AnyPrecisionAdamW(mine, variance_dtype=FP32, **settings), mine, 200)
    run(torch.optim.AdamW(theirs, foreach=False, **settings), theirs, 200)
    assert all((a - b).abs().max() <= 1e-7 for a, b in zip(mine, theirs))
    assert (mine[0] - parameters(FP32)[0]).abs().mean() > 0.1


def test_fp64_arithmetic_for_fp64_weights():
    """Without compiled or fp32 steps in between: 1e-12 is out of their reach."""
    kinds = {"momentum_dtype": torch.float64, "variance_dtype": torch.float64}
    mine, theirs = parameters(torch.float64), parameters(torch.float64)
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    run(AnyPrecisionAdamW(mine, use_kahan_summation=True, compensation_buffer_dtype=torch.float64, **kinds, **settings), mine, 50)
    run(torch.optim.AdamW(theirs, foreach=False, **settings), theirs, 50)
    assert all((a - b).abs().max() <= 1e-12 for a, b in zip(mine, theirs))


@pytest.mark.parametrize("summation", ["kahan", "split", "stochastic", "none"])
def test_sixteen_bit_weights_go_where_fp32_goes(summation):
    """The movement's part along fp32's, and (kahan, split) its distance, which is little more than one rounding to bf16."""
    mine, start = parameters(BF16), [p.detach().double() for p in parameters(BF16)]
    theirs = [nn.Parameter(p.detach().float()) for p in mine]
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
    run(AnyPrecisionAdamW(mine, summation=summation, momentum_dtype=BF16, **settings), mine, 200)
    run(torch.optim.AdamW(theirs, **settings), theirs, 200)
    moved, truth = mine[0].detach().double() - start[0], theirs[0].detach().double() - start[0]
    along = float((moved * truth).sum() / (truth * truth).sum())
    if summation == "none":
        assert along < 0.9
        return
    assert along == pytest.approx(1.0, abs=0.03)
    assert summation == "stochastic" or (moved - truth).norm() < 3e-3 * theirs[0].norm()
    assert all(p.dtype == BF16 for p in mine)


def test_two_variance_decays_differ_and_none_becomes_one():
    """Scalars stay in double precision until they meet fp32: 0.9999 would be 1.0 in bf16."""
    results = []
    for beta in (0.999, 0.9999):
        (p,) = parameters(BF16, ((50,),))
        run(AnyPrecisionAdamW([p], betas=(0.9, beta), momentum_dtype=BF16), [p], 100)
        assert torch.isfinite(p).all()
        results.append(p.detach().clone())
    assert not torch.equal(*results)


def test_mup_groups():
    model = Toy(64)
    model.roles = compute_roles(model, base_shapes_from_width(Toy, 16))
    model.to(BF16)
    options = {"lr": 0.01, "weight_decay": 0.0, "betas": (0.9, 0.95), "momentum_dtype": BF16}
    optimizer = MuAdamW(model, impl=AnyPrecisionAdamW, summation="split", **options)
    rates = {group["kind"]: group["lr"] for group in optimizer.param_groups}
    assert rates["hidden"] == pytest.approx(0.01 / 4) and rates["embedding"] == 0.01
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    # A first step of Adam is lr, whatever the gradient. Seen in fp32: a bf16 gain of 1 could not show it.
    for (name, parameter), old in zip(model.named_parameters(), before):
        lr = 0.01 / 4 if model.roles[name].kind == "hidden" else 0.01
        assert float((old.double() - _exact(parameter, optimizer)).mean()) == pytest.approx(lr, rel=1e-3), name


def _exact(parameter, optimizer):
    """The fp32 weight that `split` holds."""
    state = optimizer.state[parameter]
    left = state["lower"].to(torch.int32) * 256 + state["lowest"].to(torch.int32) - 32768
    return (parameter.detach().float().view(torch.int32) + left).view(FP32).double()


def test_closure_tensor_rate_and_missing_gradients():
    one, other = parameters(BF16, ((40, 40), (8,)))
    optimizer = AnyPrecisionAdamW([one, other], lr=torch.tensor(0.01), betas=(0.9, 0.95))
    before = other.detach().clone()

    def closure():
        optimizer.zero_grad(set_to_none=True)
        loss = (one.float() ** 2).sum()
        loss.backward()
        if wanted:
            other.grad = torch.ones_like(other)
        return loss.detach()

    wanted = []
    losses = [float(optimizer.step(closure)) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    assert torch.equal(other, before) and other not in optimizer.state
    wanted.append(True)
    optimizer.step(closure)
    assert float(optimizer.state[other]["step"]) == 1 and float(optimizer.state[one]["step"]) == 4
    # Its own first step, with its own bias correction: lr, not less.
    assert float((before.float() - other.detach().float()).mean()) == pytest.approx(0.01, rel=0.1)
    optimizer.param_groups[0]["lr"] = 0.0
    held = one.detach().clone()
    optimizer.step()
    assert (one.float() - held.float()).abs().max() <= 2**-8


def test_a_step_late_is_the_same_step():
    """Parameters with different numbers of steps in one buffer: as if each had an optimizer of its own."""
    shapes = ((64,), (32,), (64,), (40000,))
    together, alone = parameters(BF16, shapes), parameters(BF16, shapes)
    joint = AnyPrecisionAdamW(together, lr=1e-2, betas=(0.9, 0.95))
    single = [AnyPrecisionAdamW([p], lr=1e-2, betas=(0.9, 0.95)) for p in alone]
    for step in range(6):
        give_gradients(together, step)
        give_gradients(alone, step)
        for number in range(4):
            if (step + number) % 4 == 0 and step < 2:
                together[number].grad = alone[number].grad = None
        joint.step()
        for optimizer in single:
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(together, alone))
    assert len({float(joint.state[p]["step"]) for p in together}) == 2


def test_sparse_and_complex_are_refused():
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = AnyPrecisionAdamW(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="dense gradients only.*sparse=False"):
        optimizer.step()
    with pytest.raises(ConfigError, match="real floating-point"):
        AnyPrecisionAdamW([nn.Parameter(torch.zeros(2, dtype=torch.complex64))])


@pytest.mark.parametrize(
    "options,text",
    [
        ({"summation": "exact"}, "kahan, split"),
        ({"summation": "split", "use_kahan_summation": True}, "contradicts"),
        ({"summation": "split", "numerics": "published"}, "torchdistx has no such choice"),
        ({"variance": "fp32", "variance_dtype": BF16}, "contradicts"),
        ({"variance_dtype": BF16}, "cannot decay by 0.999.*stochastic"),
        ({"variance": "bf16", "betas": (0.9, 0.997)}, "cannot decay by 0.997"),
        ({"momentum_dtype": BF16, "betas": (0.999, 0.95)}, "cannot decay by 0.999.*float32"),
        ({"variance_dtype": FP16}, "vanish in fp16"),
        ({"momentum_dtype": torch.int8}, "floating-point type"),
        ({"betas": (0.9, 1.0)}, "less than 1"),
        ({"lr": -1.0}, "0 or more"),
        ({"eps": torch.tensor(1e-8)}, "must be a number"),
    ],
)
def test_options_that_cannot_be_honoured(options, text):
    with pytest.raises(ConfigError, match=text):
        AnyPrecisionAdamW(parameters(BF16), **options)


def test_fp16_weights():
    with pytest.raises(ConfigError, match="bf16 weights"):
        AnyPrecisionAdamW(parameters(FP16), summation="split")
    params = parameters(FP16, ((1000,),))
    optimizer = AnyPrecisionAdamW(params, lr=1e-5, betas=(0.9, 0.95), variance_dtype=FP32, compensation_buffer_dtype=FP16)
    before = params[0].detach().double().mean()
    for _ in range(1000):
        params[0].grad = torch.ones_like(params[0])
        optimizer.step()
    after = (params[0].detach().double() + optimizer.state[params[0]]["compensation"].double()).mean()
    assert float(before - after) == pytest.approx(0.01, rel=0.005)
