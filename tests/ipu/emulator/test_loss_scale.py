"""Automatic loss scaling, against its rule by hand (popart transforms/automaticlossscaling.cpp, popx/op/lossscaleupdatex.cpp)."""
from __future__ import annotations

from typing import Any, List

import pytest
import torch
from torch import nn

import ipu_lean.ipu.emulator as poptorch

pytestmark = pytest.mark.pod


class Line(nn.Module):
    """A product whose gradients are known: of the weight the sum of x over the rows, of x nothing."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss((x @ self.weight).float(), "sum")


def trained(x: float, calls: int, start: float = 256.0, iterations: int = 1, accumulation: int = 1, **settings: Any) -> Any:
    """The scale before each call and after the last one; the weight; the executor is destroyed."""
    options = poptorch.Options().deviceIterations(iterations)
    options.Training.gradientAccumulation(accumulation).setAutomaticLossScaling(True)
    for key, value in settings.items():
        options._Popart.set(f"automaticLossScalingSettings.{key}", value)
    model = Line()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=2.0 ** -6, loss_scaling=start, accum_type=torch.float16)
    executor = poptorch.trainingModel(model, options, optimizer)
    rows = torch.full((iterations * accumulation, 1), x).half()
    executor.compile(rows)
    scales: List[float] = [executor._executable.loss_scaling()]
    for _ in range(calls):
        executor(rows)
        scales.append(executor._executable.loss_scaling())
    executor.copyWeightsToHostIfNeeded()
    executor.destroy()
    return scales, model.weight.item()


def test_the_scale_moves_by_the_rule() -> None:
    """The gradient is the scale itself: at 4096 it reaches a sixteenth of 65535, so the scale goes back; and so on for ever."""
    scales, weight = trained(1.0, 9)
    assert scales == [256, 512, 1024, 2048, 4096, 2048, 4096, 2048, 4096, 2048]
    assert weight == -9 * 2.0 ** -6  # whatever the scale


def test_small_gradients_take_it_to_its_limit() -> None:
    assert trained(2.0 ** -10, 10)[0][-3:] == [2.0 ** 15] * 3


def test_an_overflow_takes_it_down() -> None:
    """At 2^15 a gradient of 8 is infinite: the update is lost to it, and the scale comes down."""
    scales, weight = trained(8.0, 1, start=2.0 ** 15)
    assert scales == [2.0 ** 15, 2.0 ** 14] and weight == float("-inf")


def test_it_moves_with_each_update_of_a_call() -> None:
    assert trained(1.0, 2, iterations=4)[0] == [256, 4096, 4096]
    assert trained(1.0, 2, accumulation=4)[0] == [256, 512, 1024]


def test_settings_of_popart() -> None:
    assert trained(1.0, 4, binEdgeLocation=0.25)[0] == [256, 512, 1024, 2048, 4096]
    assert trained(1.0, 6, binEdgeLocation=0.0078125)[0] == [256, 512, 256, 512, 256, 512, 256]
    assert trained(1.0, 4, updatePeriod=2)[0] == [256, 512, 512, 1024, 1024]
    assert trained(1.0, 6, thresholdUpperCountProportion=1.0)[0][-1] == 2.0 ** 14


def test_without_it_the_scale_stays() -> None:
    model = Line()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=2.0 ** -6, loss_scaling=64.0)
    executor = poptorch.trainingModel(model, None, optimizer)
    for _ in range(3):
        executor(torch.ones(1, 1).half())
    assert executor._executable.loss_scaling() == 64.0 and "lossScaleUpdateFactor" not in optimizer.state_dict()["ipu_state"]
    executor.destroy()


def test_the_factor_is_part_of_the_optimizers_state() -> None:
    """It survives a detach, and goes into another executor with the state."""
    def start() -> Any:
        options = poptorch.Options()
        options.Training.setAutomaticLossScaling(True)
        model = Line()
        optimizer = poptorch.optim.SGD(model.parameters(), lr=2.0 ** -6, loss_scaling=256.0, accum_type=torch.float16)
        return optimizer, poptorch.trainingModel(model, options, optimizer)

    rows = torch.ones(1, 1).half()
    optimizer, executor = start()
    executor(rows)
    executor(rows)
    executor.detachFromDevice()
    state = optimizer.state_dict()
    assert state["ipu_state"]["lossScaleUpdateFactor"].item() == 4.0
    executor(rows)
    assert executor._executable.loss_scaling() == 2048.0
    executor.destroy()
    other, second = start()
    other.load_state_dict(state)
    second(rows)
    assert second._executable.loss_scaling() == 2048.0
    second.destroy()
