"""float16 models: rounding after each op, stochastic rounding, accumulator types, loss scaling (docs/user_guide/overview.rst)."""
from __future__ import annotations

from typing import Any, List, Tuple

import pytest
import torch
from torch import nn

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.ipu.emulator import half

from .common import Calls, Classifier, options, tokens

pytestmark = pytest.mark.pod


def test_rounding_to_nearest_is_torchs() -> None:
    x = torch.randn(1000)
    assert torch.equal(half.round_half(x), x.half())


@pytest.mark.parametrize("value", [1.0 + 2.0 ** -12, 3.14159, -0.1, 2.0 ** -20 + 2.0 ** -26, 1e-8])
def test_stochastic_rounding_keeps_the_mean(value: float) -> None:
    """Only the two neighbours come out, each so often that the mean is the value."""
    torch.manual_seed(0)
    count = 40000
    with half.rounding(True):
        found = half.round_half(torch.full((count,), value)).double()
    low, high = found.min().item(), found.max().item()
    assert set(found.tolist()) == {low, high} and low < value < high
    assert abs(found.mean().item() - value) < 5 * (high - low) / 2 / count ** 0.5


def test_stochastic_rounding_leaves_halves_alone_and_overflows_to_infinity() -> None:
    x = torch.randn(1000).half().float()
    with half.rounding(True):
        assert torch.equal(half.round_half(x).float(), x)
        assert torch.isinf(half.round_half(torch.tensor([1e6, float("inf")]))).all()


def test_each_op_is_computed_wide_and_rounded_once() -> None:
    torch.manual_seed(0)
    model = Calls(lambda m, x: torch.tanh(m.layer(x)) * 3 + x, width=16).half()
    x = torch.randn(5, 16).half()
    executor = poptorch.inferenceModel(model)
    linear = (x.float() @ model.layer.weight.float().t() + model.layer.bias.float()).half()
    expected = ((torch.tanh(linear.float()).half().float() * 3).half().float() + x.float()).half()
    found = executor(x)
    assert found.dtype == torch.float16 and torch.equal(found, expected)
    executor.destroy()


def test_mixed_types_give_float32() -> None:
    """docs/user_guide/supported_ops.rst:437-447."""
    executor = poptorch.inferenceModel(Calls(lambda m, x, y: (x + y, x * x, x.float().half())))
    mixed, same, again = executor(torch.ones(2).half(), torch.ones(2))
    assert (mixed.dtype, same.dtype, again.dtype) == (torch.float32, torch.float16, torch.float16)
    executor.destroy()


def test_writing_in_place_into_half_buffers() -> None:
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(2).half())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_(x)
            return self.total + 0

    executor = poptorch.inferenceModel(Running(), options(1, 3))
    assert executor(torch.ones(6).half()).tolist() == [1, 1, 2, 2, 3, 3]
    executor.destroy()


def losses(wide: bool, stochastic: bool, updates: int = 50, **kw: Any) -> Tuple[List[float], nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Classifier(width=32)
    if not wide:
        model.half()
    made = options(3, mode=poptorch.OutputMode.All).randomSeed(5)
    made.Precision.enableStochasticRounding(stochastic)
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=3e-3, loss_scaling=1.0 if wide else 256.0, **kw)
    executor = poptorch.trainingModel(model, made, optimizer)
    found = []
    for step in range(updates):
        seen = tokens(12, seed=step, length=8)[0]
        found.append(executor(seen, (3 * seen + 1) % 11)[1].float().mean().item())
    state = optimizer.state_dict()["ipu_state"]
    executor.destroy()
    optimizer.kept = state
    return found, model, optimizer


@pytest.mark.parametrize("stochastic", [False, True])
def test_half_training_stays_within_one_percent(stochastic: bool) -> None:
    """50 updates: the loss falls to a tenth, and float16's is within 1 % of float32's all along."""
    wide, _, _ = losses(True, False)
    narrow, model, _ = losses(False, stochastic)
    assert wide[-1] < 0.1 * wide[0] and model.head.weight.dtype == torch.float16
    assert max(abs(one - other) / one for one, other in zip(wide, narrow)) < 0.01


def test_stochastic_runs_repeat_with_their_seed() -> None:
    first, again, nearest = (losses(False, stochastic, 3)[1].up.weight for stochastic in (True, True, False))
    assert torch.equal(first, again) and not torch.equal(first, nearest)


def test_accumulators_and_first_moments_in_float16() -> None:
    """python/_optimizer_attributes.py:130-152: float16 accumulators take the running mean. The moments' types are set apart."""
    found, _, optimizer = losses(False, True, 20, accum_type=torch.float16, first_order_momentum_accum_type=torch.float16)
    assert found[-1] < found[0] and all(torch.isfinite(torch.tensor(found)))
    assert optimizer.kept["Accl1___head.weight"].dtype == torch.float16
    assert optimizer.kept["Accl2___head.weight"].dtype == torch.float32


@pytest.mark.parametrize("stochastic", [False, True])
def test_small_updates_are_lost_unless_rounded_stochastically(stochastic: bool) -> None:
    """An update of a tenth of the spacing never moves a weight to nearest, and moves it by its mean stochastically."""
    class Push(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4000).half())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return poptorch.identity_loss((self.weight * x).float(), "sum")

    model = Push()
    made = poptorch.Options().randomSeed(1)
    made.Precision.enableStochasticRounding(stochastic)
    executor = poptorch.trainingModel(model, made, poptorch.optim.SGD(model.parameters(), lr=2.0 ** -10 / 10))
    for _ in range(20):
        executor(-torch.ones(4000).half())
    moved = (model.weight.float() - 1).mean().item()
    executor.destroy()
    assert moved == (0 if not stochastic else pytest.approx(20 * 2.0 ** -10 / 10, rel=0.1))


def test_a_running_mean_does_not_overflow() -> None:
    """python/options.py:278-305: a sum of 8 gradients of 40000 would be infinite in float16."""
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss((m.layer(x) * 40000).float(), "sum")

    torch.manual_seed(0)
    model = Calls(forward, width=1).half()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1e-5, accum_type=torch.float16)
    executor = poptorch.trainingModel(model, options(8), optimizer)
    before = model.layer.bias.item()
    executor(torch.ones(8, 1).half())
    assert model.layer.bias.item() - before == pytest.approx(-0.4, abs=1e-3)
    executor.destroy()
