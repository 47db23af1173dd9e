"""Random numbers and autocast: the second run sees what the first saw and leaves no trace."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from ipu_lean._compat import autocast_state
from ipu_lean.reversible import ReversibleBlock, ReversibleStack
from tests.reversible.toys import (
    WIDTH,
    FeedForward,
    assert_same,
    collect,
    data,
    gradients,
    loss_of,
    reversible,
)

pytestmark = pytest.mark.pod
RECOMPUTING = ["invert", "checkpoint"]


@pytest.mark.parametrize("engine", RECOMPUTING)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_random_state_after_backward_is_that_before(engine, dropout):
    stack = reversible(engine, dropout=dropout)
    before_forward = torch.get_rng_state()
    loss = loss_of(stack(data()))
    torch.rand(5)
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(before, before_forward)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_the_forward_pass_draws_what_plain_draws(engine):
    states = []
    for kind in ("store", engine):
        stack = reversible(kind, dropout=0.5)
        torch.manual_seed(11)
        stack(data())
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_each_layer_has_its_own_dropout_mask(engine):
    masks = []

    class Dropped(nn.Module):
        def forward(self, x):
            masks.append(nn.functional.dropout(torch.ones(WIDTH), 0.5))
            return x * masks[-1]

    branch = Dropped()
    stack = ReversibleStack([ReversibleBlock([branch, branch])] * 2, engine=engine)
    stack(data().requires_grad_()).sum().backward()
    first, second = masks[:4], masks[4:]
    assert all(not torch.equal(a, b) for i, a in enumerate(first) for b in first[:i])
    expected = first[::-1] if engine == "invert" else first[2:] + first[:2]
    assert len(second) == 4 and all(torch.equal(a, b) for a, b in zip(expected, second))


class Spy(FeedForward):
    """Notes the dtype that matrix products run in, and autocast's state."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        product = self.up(x)
        self.seen.append((product.dtype, *autocast_state("cpu"), autocast_state("cpu")[0] and torch.is_autocast_cache_enabled()))
        return super().forward(x) + product.mean()


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_autocast_is_captured_at_each_call(engine):
    """One stack, called in three ways before a single backward pass outside of autocast."""
    stack = reversible(engine, layers=1, dtype=torch.float32, make=Spy)
    x, spy = data(torch.float32), stack.blocks[0].branches[1]
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        one = stack(x)
        with torch.autocast("cpu", enabled=False):
            two = stack(x * 2)
    three = stack(x * 3)
    first, spy.seen = spy.seen, []
    assert [seen[0] for seen in first] == [torch.bfloat16, torch.float32, torch.float32]
    (one.float().sum() + two.sum() + three.sum()).backward()
    assert sorted(map(str, spy.seen)) == sorted(map(str, first))
    assert not autocast_state("cpu")[0]


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_backward_inside_another_autocast(engine):
    def run(engine):
        stack = reversible(engine, dtype=torch.float32, dropout=0.2)
        torch.manual_seed(7)
        loss = loss_of(stack(data(torch.float32)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss.backward()
        return collect(stack)

    assert_same(run("store"), run(engine), 2e-6)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_autocast_inside_a_branch(engine):
    class Wide(FeedForward):
        """Keeps itself in float32 whatever is around it."""

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return super().forward(x.float())

    class Narrow(FeedForward):
        """Chooses bfloat16 itself."""

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    for make, outside in ((Wide, torch.bfloat16), (Narrow, None)):
        options = {"dtype": torch.float32, "make": make, "layers": 2}
        reference = gradients(reversible("store", **options), autocast=outside)
        assert_same(reference, gradients(reversible(engine, **options), autocast=outside), 2e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("engine", RECOMPUTING)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cuda_dropout_and_autocast(engine, dtype):
    class OnDevice(FeedForward):
        pass

    def run(engine):
        torch.manual_seed(0)
        stack = ReversibleStack([ReversibleBlock([OnDevice(0.2), OnDevice(0.2)]) for _ in range(3)], engine=engine).cuda()
        torch.manual_seed(7)
        with torch.autocast("cuda", dtype=dtype):
            y = stack(data(torch.float32).cuda())
        loss = (y.float() ** 2).mean()
        before = torch.cuda.get_rng_state()
        loss.backward()
        assert torch.equal(before, torch.cuda.get_rng_state())
        return collect(stack)

    assert_same(run("store"), run(engine), 2e-3)
