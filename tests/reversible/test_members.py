"""Buffers and parameters: the second run sees those of the first and changes none."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.reversible.toys import WIDTH, assert_same, data, error, gradients, loss_of, reversible

pytestmark = pytest.mark.pod
RECOMPUTING = ["invert", "checkpoint"]


class Normalised(nn.Module):
    """BatchNorm over the features, with its running statistics and its counter."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(self.norm(x.flatten(0, 1)).view(x.shape))


class Drifting(nn.Module):
    """Its output depends on a counter that each run in training mode moves: the second run must start from the old value."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.ones(1))
        self.register_buffer("replaced", torch.ones(1))
        self.register_buffer("table", torch.linspace(0.5, 1, WIDTH), persistent=False)

    def forward(self, x):
        h = torch.tanh(self.linear(x)) * self.count.clone() * self.replaced * self.table
        if self.training:
            self.count.add_(0.25)
            self.replaced = self.replaced * 1.1
        return h


@pytest.mark.parametrize("engine", RECOMPUTING)
@pytest.mark.parametrize("make", [Normalised, Drifting])
@pytest.mark.parametrize("visits", [[0, 1, 2], [0, 0, 1]])
def test_buffers_are_updated_once(engine, make, visits):
    def run(engine):
        stack = reversible(engine, layers=3, make=make, visits=visits)
        found = {}
        for step in range(3):
            stack.zero_grad()
            found.update({f"{step} {name}": g for name, g in gradients(stack).items()})
        stack.eval()
        found.update({f"eval {name}": g for name, g in gradients(stack).items()})
        return found, {name: b.clone() for name, b in stack.named_buffers()}

    (reference, buffers), (found, recomputed) = run("store"), run(engine)
    assert_same(reference, found, 1e-10)
    assert buffers and set(buffers) == set(recomputed)
    for name in buffers:
        assert error(buffers[name].double(), recomputed[name].double()) < 1e-12, name
    if make is Normalised:
        assert recomputed["blocks.0.branches.1.norm.num_batches_tracked"] == 3 * visits.count(0)


def test_buffers_that_do_not_change_are_not_copied_again():
    from ipu_lean.reversible.surroundings import Buffers

    branch = Drifting()
    for copies in (3, 2):
        buffers = Buffers([branch], [[branch, branch.linear]])
        assert sum(copy is not None for *_, copy in buffers._entries) == copies
        branch(torch.ones(1, WIDTH))
        assert {name for _, name, _ in buffers.changed()} == {"count", "replaced"}


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_functional_call(engine):
    """The second run comes when the parameters of `functional_call` have left the module again."""
    from torch.func import functional_call

    def run(engine):
        stack = reversible(engine, dropout=0.2, make=Drifting).eval()
        generator = torch.Generator().manual_seed(8)
        weights = {
            name: (p.detach() + 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)).requires_grad_()
            for name, p in stack.named_parameters()
        }
        torch.manual_seed(7)
        members = {name: w * 1.5 for name, w in weights.items()}
        members.update({name: b + 0.5 for name, b in stack.named_buffers()})
        loss = loss_of(functional_call(stack, members, (data(),)))
        loss.backward()
        assert all(p.grad is None for p in stack.parameters())
        return {name: w.grad for name, w in weights.items()}

    reference = run("store")
    assert_same(reference, run(engine), 1e-10)
    own = gradients(reversible("store", dropout=0.2, make=Drifting).eval())
    assert error(reference["blocks.0.branches.1.linear.weight"], own["blocks.0.branches.1.linear.weight"]) > 1e-2


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_parameters_replaced_before_the_backward_pass(engine):
    stack = reversible(engine)
    old = dict(stack.named_parameters())
    loss = loss_of(stack(data()))
    for block in stack.blocks:
        block.branches[1].down.weight = nn.Parameter(torch.zeros_like(block.branches[1].down.weight))
    loss.backward()
    found = {name: p.grad for name, p in old.items()}
    assert_same(gradients(reversible("store"), data()), found, 1e-10)
    assert all(block.branches[1].down.weight.norm() == 0 for block in stack.blocks)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_torch_func_runs_as_store(engine):
    from torch.func import functional_call, grad, vmap

    stack = reversible(engine).eval()
    weights = {name: p.detach() for name, p in stack.named_parameters()}
    found = grad(lambda w: loss_of(functional_call(stack, w, (data(),))))(weights)
    assert_same(gradients(reversible("store").eval(), data()), found, 1e-10)
    batch = torch.stack([data(seed=seed) for seed in range(3)])
    assert torch.allclose(vmap(stack)(batch), torch.stack([stack(x) for x in batch]), atol=1e-12)
