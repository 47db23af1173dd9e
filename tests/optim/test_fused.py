"""FusedUpdate over every optimizer that it takes, by itself: the bits of a step after the backward pass."""
from __future__ import annotations

from typing import Any, Dict

import pytest
import torch
from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.mup import base_shapes_from_width, compute_roles
from ipu_lean.optim import AnyPrecisionAdamW, FusedUpdate, MuAdam, MuAdamW, MuSGD, native
from tests.mup.toy import Toy

needs_hooks = pytest.mark.skipif(
    not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"), reason="this torch does not say when a gradient is complete"
)
BF16 = torch.bfloat16
PURE: Dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "momentum_dtype": BF16}


class Net(nn.Module):
    """A matrix used twice, one that lies in memory the other way round, small vectors, and a parameter that nothing reads."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twice = nn.Parameter(torch.randn(80, 80) / 9)
        self.turned = nn.Parameter((torch.randn(80, 96) / 9).t())
        self.gain, self.scalar = nn.Parameter(torch.ones(80)), nn.Parameter(torch.ones(()))
        self.idle = nn.Parameter(torch.ones(100, 100))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ self.twice) * self.gain
        return (torch.tanh(h @ self.twice) @ self.turned.t() * self.scalar).float().square().mean()


def plain(kind: Any, **options: Any) -> Any:
    return lambda model: kind(model.parameters(), **options)


CASES: Dict[str, Any] = {
    "kahan": (BF16, plain(AnyPrecisionAdamW, **PURE)),
    "split, not flat": (BF16, plain(AnyPrecisionAdamW, summation="split", flatten=False, **PURE)),
    "stochastic": (BF16, plain(AnyPrecisionAdamW, summation="stochastic", variance="stochastic", seed=3, **PURE)),
    "eager": (BF16, plain(AnyPrecisionAdamW, compiled=False, **PURE)),
    "published": (BF16, plain(AnyPrecisionAdamW, numerics="published", variance_dtype=BF16, **PURE)),
    "maximize, fp32": (torch.float32, plain(AnyPrecisionAdamW, maximize=True, lr=1e-2)),
    "adamw": (torch.float32, plain(torch.optim.AdamW, lr=1e-2, amsgrad=True)),
    "adam": (torch.float32, plain(torch.optim.Adam, lr=1e-2, weight_decay=0.1)),
    "sgd": (torch.float32, plain(torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True)),
}
if native.compiler() is not None:
    CASES["in C"] = (BF16, plain(AnyPrecisionAdamW, compiled=True, **PURE))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, fused: bool, steps: int = 3) -> None:
    draw = torch.Generator().manual_seed(1)
    update = FusedUpdate(optimizer) if fused else None
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = group.get("initial_lr", 1e-2) * (step + 1) / steps  # a schedule
        optimizer.zero_grad(set_to_none=True)
        if isinstance(model, Toy):
            found = model(torch.randint(0, 10, (5,), generator=draw)).float()
            loss = nn.functional.cross_entropy(found, torch.randint(0, 5, (5,), generator=draw))
        else:
            loss = model(torch.randn(5, 80, generator=draw).to(next(model.parameters()).dtype))
        if update is not None:
            update.begin()
        loss.backward()
        if update is None:
            optimizer.step()
        else:
            update.finish()


def assert_same(one: nn.Module, first: Any, two: nn.Module, second: Any) -> None:
    for (name, p), q in zip(one.named_parameters(), two.parameters()):
        assert torch.equal(p, q), name
        mine, theirs = first.state.get(p, {}), second.state.get(q, {})
        assert mine.keys() == theirs.keys(), name
        assert all(torch.equal(value, theirs[key]) for key, value in mine.items() if torch.is_tensor(value)), name


@needs_hooks
@pytest.mark.parametrize("case", CASES)
def test_the_same_bits(case: str) -> None:
    dtype, make = CASES[case]
    one, two = Net(dtype), Net(dtype)
    first, second = make(one), make(two)
    train(one, first, False)
    train(two, second, True)
    assert_same(one, first, two, second)
    assert all(p.grad is None for p in two.parameters())
    start = Net(dtype)
    moved = [not torch.equal(p, q) for p, q in zip(start.parameters(), two.parameters())]
    assert moved[0] and moved[1] and torch.equal(start.idle, two.idle)


@needs_hooks
@pytest.mark.parametrize(
    "build",
    [
        lambda model: MuAdam(model, lr=1e-2),
        lambda model: MuAdamW(model, lr=1e-2),
        lambda model: MuSGD(model, lr=1e-2),
        lambda model: MuAdamW(model.to(BF16), impl=AnyPrecisionAdamW, **PURE),
    ],
    ids=["MuAdam", "MuAdamW", "MuSGD", "MuAdamW in bf16"],
)
def test_under_mup_every_group_keeps_its_rate(build: Any) -> None:
    sides = []
    for fused in (False, True):
        torch.manual_seed(0)
        model = Toy(96)
        model.roles = compute_roles(model, base_shapes_from_width(Toy, 16))
        optimizer = build(model)
        assert len({group["lr"] for group in optimizer.param_groups}) > 1
        train(model, optimizer, fused)
        sides += [model, optimizer]
    assert_same(*sides)


@needs_hooks
def test_what_is_measured_comes_in_the_order_of_the_groups() -> None:
    model = Net(torch.float32)
    optimizer = torch.optim.SGD([{"params": [model.gain, model.turned]}, {"params": [model.twice, model.scalar]}], lr=0.0)
    update = FusedUpdate(optimizer, lambda gradient: float(gradient.norm()))
    update.begin()
    model(torch.ones(2, 80)).backward()
    found = update.finish()
    update.remove()
    model(torch.ones(2, 80)).backward()
    truth = [float(p.grad.norm()) for group in optimizer.param_groups for p in group["params"]]
    assert found == pytest.approx(truth, rel=1e-6) and len(found) == 4


@needs_hooks
def test_an_update_has_one_backward_pass() -> None:
    model = Net(torch.float32)
    update = FusedUpdate(torch.optim.SGD(model.parameters(), lr=0.1))
    update.begin()
    model(torch.ones(2, 80)).backward()
    with pytest.raises(ConfigError, match="second time"):
        model(torch.ones(2, 80)).backward()


@needs_hooks
def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(100, 64, sparse=True)
    update = FusedUpdate(AnyPrecisionAdamW(table.parameters()))
    update.begin()
    with pytest.raises(ConfigError, match="dense gradients only"):
        table(torch.tensor([1, 2])).sum().backward()
