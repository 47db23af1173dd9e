"""torch.compile: branches one by one, and a model that contains a stack (which then runs uncompiled)."""
from __future__ import annotations

import pytest
import torch

from ipu_lean._compat import TORCH
from tests.reversible.toys import assert_same, collect, data, gradients, loss_of, reversible

pytestmark = pytest.mark.skipif(TORCH < (2, 2), reason="compiled modules with saved-tensor hooks need torch 2.2 or newer")


@pytest.mark.parametrize("engine", ["invert", "checkpoint"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_compiled_branches(engine, dropout):
    torch._dynamo.reset()
    reference, stack = gradients(reversible("store", layers=2, dropout=dropout)), reversible(engine, layers=2, dropout=dropout)
    for block in stack.blocks:
        for place, branch in enumerate(block.branches):
            block.branches[place] = torch.compile(branch, backend="aot_eager")
    found = {name.replace("._orig_mod", ""): g for name, g in gradients(stack).items()}
    assert_same(reference, found, 1e-10)


@pytest.mark.parametrize("engine", ["invert", "checkpoint"])
def test_a_compiled_model_around_the_stack(engine):
    torch._dynamo.reset()

    class Model(torch.nn.Module):
        def __init__(self, engine):
            super().__init__()
            self.stack = reversible(engine, layers=2)

        def forward(self, x):
            return torch.tanh(self.stack(x * 2) + 1)

    found = []
    for wrap, kind in ((lambda m: m, "store"), (lambda m: torch.compile(m, backend="aot_eager"), engine)):
        model, x = Model(kind), data().requires_grad_()
        loss_of(wrap(model)(x)).backward()
        found.append(collect(model, x=x))
    assert_same(*found, 1e-10)
