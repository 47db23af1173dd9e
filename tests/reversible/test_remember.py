"""Discrete decisions that the second run must not take again."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from ipu_lean.reversible import ReversibleBlock, ReversibleStack, recomputing, remember
from tests.reversible.toys import Attention, FeedForward, assert_same, data, gradients, loss_of, reversible

pytestmark = pytest.mark.pod
RECOMPUTING = ["invert", "checkpoint"]


class Router(nn.Module):
    """Sends each token one of two ways, by the sign of a number so near zero that rounding decides."""

    def __init__(self, kept):
        super().__init__()
        self.ways = nn.ModuleList([FeedForward(), FeedForward()])
        self.kept, self.decisions = kept, []

    def forward(self, x):
        def decide():
            return torch.sin(x.sum(-1, keepdim=True) * 1e8) > 0

        choice = remember(decide) if self.kept else decide()
        self.decisions.append((recomputing(), choice))
        return torch.where(choice, self.ways[0](x), self.ways[1](x))


def decisions_differ(kept):
    """Whether a decision of the first run differs from that of the second; one step with `visits` and two calls."""
    stack = reversible("invert", layers=2, make=lambda: Router(kept), visits=[0, 1, 0], dtype=torch.float32)
    (loss_of(stack(data(torch.float32, 1))) + loss_of(stack(data(torch.float32, 2)))).backward()
    differ = 0
    for block in stack.blocks:
        first = [choice for again, choice in block.branches[1].decisions if not again]
        second = [choice for again, choice in block.branches[1].decisions if again]
        assert len(first) == len(second) > 0
        # Frames of one call are replayed in reverse; the second call's graph comes first, since its nodes are younger.
        differ += sum(not torch.equal(a, b) for a, b in zip(first, reversed(second)))
    return differ


def test_remembered_decisions_survive_rounding():
    assert decisions_differ(kept=False) > 0, "the test needs decisions that rounding can turn"
    assert decisions_differ(kept=True) == 0


@pytest.mark.parametrize("engine", ["invert", "checkpoint"])
def test_remembered_decisions_inside_a_nested_stack(engine):
    class Nested(nn.Module):
        def __init__(self, engine):
            super().__init__()
            self.inner = ReversibleStack([ReversibleBlock([Attention(), Router(True)])], engine=engine)

        def forward(self, x):
            return self.inner(x)

    options = {"layers": 2, "dtype": torch.float32}
    stack = reversible(engine, make=lambda: Nested(engine), **options)
    reference = reversible("store", make=lambda: Nested("store"), **options)
    assert_same(gradients(reference), gradients(stack), 1e-5)


def test_outside_a_recorded_run():
    assert remember(lambda: 5) == 5 and not recomputing()
    with torch.no_grad():
        assert reversible("invert", make=lambda: Router(True))(data()) is not None
