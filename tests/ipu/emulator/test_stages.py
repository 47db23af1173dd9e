"""What a stage keeps, counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.ipu.emulator.examine import examine
from ipu_lean.ipu.emulator.stages import kept_by_stage

pytestmark = pytest.mark.pod


class Two(nn.Module):
    """A layer on each of two IPUs, then ten logits a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.last = nn.Linear(8, 10, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """x `[rows, 6]`, y `[rows]`."""
        with poptorch.Block("one", ipu_id=0):
            h = torch.tanh(self.first(x))
        with poptorch.Block("two", ipu_id=1):
            h = torch.tanh(self.second(h))
            return nn.functional.cross_entropy(self.last(h), y.long())


def test_two_stages_by_hand() -> None:
    rows = 4
    options = poptorch.Options()
    options.Training.gradientAccumulation(3)
    data = (torch.zeros(3 * rows, 6), torch.zeros(3 * rows, dtype=torch.int32))
    report = examine(Two(), data, options=options)
    assert report.violations == []
    first, second = kept_by_stage(report.trace, options, classes=10)
    assert (first.ipu, second.ipu) == (0, 1)
    assert (first.parameters, second.parameters) == (4 * 6 * 8, 4 * (8 * 8 + 8 * 10))
    assert (first.kept, second.kept) == (0, 4 * rows * 8)  # what leaves the first stage enters the second
    assert (first.inputs, second.inputs) == (4 * rows * 6, 4 * rows)
    hidden, logits = 4 * rows * 8, 4 * rows * 10
    # tanh: its result is saved or passed on; its gradient and that of its operand move.
    assert first.live == 2 * hidden and second.live == 3 * hidden
    assert second.loss == 3 * logits  # logits, their softmax, their gradient
