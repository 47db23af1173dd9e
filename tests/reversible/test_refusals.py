"""What the engines refuse or find out, and that an error leaves nothing behind."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from ipu_lean.reversible import ReversibleBlock, ReversibleStack
from ipu_lean.reversible.frames import RecomputeError
from tests.reversible.toys import Attention, FeedForward, assert_same, collect, data, gradients, loss_of, reversible

pytestmark = pytest.mark.pod
RECOMPUTING = ["invert", "checkpoint"]


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_gradients_of_gradients_are_refused(engine):
    stack, x = reversible(engine), data().requires_grad_()
    with pytest.raises(RecomputeError, match="create_graph.*store"):
        torch.autograd.grad(loss_of(stack(x)), x, create_graph=True)
    (g,) = torch.autograd.grad(loss_of(reversible("store")(x)), x, create_graph=True)
    g.pow(2).sum().backward()


class Fragile(FeedForward):
    """Fails while it is told to."""

    broken = False

    def forward(self, x):
        if Fragile.broken:
            raise ValueError("broken")
        return super().forward(x)


def fragile(engine):
    return reversible(engine, make=lambda: Fragile(0.2))


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_a_failed_forward_leaves_nothing_behind(engine):
    reference, stack = gradients(fragile("store")), fragile(engine)
    Fragile.broken = True
    with pytest.raises(ValueError, match="broken"):
        stack(data().requires_grad_())
    Fragile.broken = False
    probe = torch.ones(3, requires_grad=True)
    assert (probe * probe).grad_fn._saved_self is not None, "no hook of ours is left in force"
    assert_same(reference, gradients(stack), 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_a_failed_backward_leaves_nothing_behind(engine):
    reference, stack = gradients(fragile("store")), fragile(engine)
    loss, state = loss_of(stack(data())), torch.get_rng_state()
    Fragile.broken = True
    with pytest.raises(ValueError, match="broken"):
        loss.backward()
    Fragile.broken = False
    assert torch.equal(state, torch.get_rng_state())
    stack.zero_grad()
    assert_same(reference, gradients(stack), 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_a_branch_that_differs_in_its_second_run_is_found_out(engine):
    class Counting(FeedForward):
        def forward(self, x):
            return super().forward(x if self.calls == 0 else x.exp().log())

    stack = reversible(engine, make=Counting)
    with pytest.raises(RecomputeError, match="second run"):
        gradients(stack)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_changed_masks_are_found_out(engine):
    stack, mask = reversible(engine), torch.zeros(6, 6, dtype=torch.float64)
    loss = loss_of(stack(data(), mask=mask))
    mask += 1
    with pytest.raises(RecomputeError, match="keyword argument.*in place"):
        loss.backward()


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_changed_parameters_are_found_out(engine):
    stack = reversible(engine)
    loss = loss_of(stack(data()))
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.mul_(1.01)
    with pytest.raises(RuntimeError, match="in place|inplace"):
        loss.backward()


def test_changed_output_is_found_out():
    stack = reversible("invert", output="x")
    y = stack(data())
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RecomputeError, match="stream of a reversible stack.*in place"):
        y.sum().backward()


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_changed_input_is_found_out(engine):
    stack, x = reversible(engine), data()
    y = stack(x)
    x.add_(1)
    with pytest.raises(RecomputeError, match="input of a .*in place"):
        y.sum().backward()


@pytest.mark.parametrize("output", ["y", "sum-minus-input"])
def test_changing_other_outputs_is_harmless(output):
    reference, found = {}, {}
    for engine, into in (("store", reference), ("invert", found)):
        stack = reversible(engine, output=output)
        y = stack(data()).add_(1)
        loss_of(y).backward()
        into.update(collect(stack))
    assert_same(reference, found, 1e-10)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_a_branch_that_changes_its_input_is_refused(engine):
    class InPlace(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    stack = ReversibleStack([ReversibleBlock([Attention().double(), InPlace()])], engine=engine)
    if engine == "invert":
        with pytest.raises(RecomputeError, match="InPlace changes its input"):
            stack(data().requires_grad_())
    else:
        with pytest.raises((RecomputeError, RuntimeError)):
            gradients(ReversibleStack([ReversibleBlock([InPlace(), Attention().double()])], engine=engine))


def test_a_branch_that_differentiates_itself():
    class Energy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = FeedForward()

        def forward(self, x):
            with torch.enable_grad():
                z = x.detach().requires_grad_()
                (force,) = torch.autograd.grad(self.inner(z).pow(2).sum(), z)
            return self.inner(x) + force

    with pytest.raises(RecomputeError, match="inside its own forward"):
        reversible("invert", make=Energy)(data())
    reversible("store", make=Energy)(data()).sum().backward()
