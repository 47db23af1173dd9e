"""Discrete decisions in derived backward passes: made once, kept, and given to the second evaluation."""
from __future__ import annotations

from typing import Any, Dict

import pytest
import torch
from torch import Tensor, nn

from ipu_lean.reversible import remember
from ipu_lean.reversible.decisions import Deciding, Decision
from ipu_lean.reversible.module_vjp import ModuleVJP
from ipu_lean.reversible.vjp import op_name

pytestmark = pytest.mark.pod
ROWS, WIDTH = 7, 5


class Sorting(nn.Module):
    """Each row is mixed with the one that stands before it when rows are sorted by a projection of theirs, times a count."""

    not_computed_with = ("label",)

    def __init__(self, seed: int = 0, label: int = 0) -> None:
        super().__init__()
        self.label = label
        draw = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=draw, dtype=torch.float64))
        self.register_buffer("direction", torch.randn(WIDTH, generator=draw, dtype=torch.float64))

    def choose(self, x: Tensor) -> Any:
        order = torch.sort((x.detach() * self.direction).sum(-1), dim=-1, stable=True)[1]
        return order, {"count": 3, "undo": torch.sort(order, dim=-1, stable=True)[1]}

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, rows, width]`."""
        h = torch.matmul(x, self.weight)
        order, rest = remember(lambda: self.choose(x))
        rows = torch.gather(h, 1, order.unsqueeze(-1).expand(h.shape))
        mixed = rows * rest["count"] + rows.roll(1, 1) * rows
        return torch.gather(mixed, 1, rest["undo"].unsqueeze(-1).expand(h.shape))


def drawn(seed: int = 1) -> Tensor:
    return torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_gradients_are_those_of_plain_autograd() -> None:
    module, x = Sorting(), drawn()
    x.requires_grad_()
    expected = module(x)
    dy = drawn(2)
    wanted = torch.autograd.grad(expected, [x, module.weight], dy)
    evaluation = ModuleVJP(module).begin((x.detach(),))
    torch.testing.assert_close(evaluation.values[0], expected.detach(), rtol=1e-13, atol=1e-13)
    for one, other in zip(wanted, evaluation.pull(dy)):
        assert float(one.norm()) > 0.1 and float((one - other).norm() / one.norm()) < 1e-12


def test_the_second_evaluation_takes_the_decisions_of_the_first() -> None:
    """Its input is another one, so that it would decide otherwise."""
    module, x, other = Sorting(), drawn(), drawn(3)
    vjp = ModuleVJP(module)
    first = vjp.begin((x,), pull=False)
    order, undo = first.decisions
    assert torch.equal(order, module.choose(x)[0]) and not torch.equal(order, module.choose(other)[0])
    module.choose = lambda x: (order, {"count": 3, "undo": undo})  # type: ignore[method-assign]
    expected = module(other.requires_grad_())
    wanted = torch.autograd.grad(expected, [other, module.weight], x)
    second = vjp.begin((other.detach(),), decisions=first.decisions)
    torch.testing.assert_close(second.values[0], expected.detach(), rtol=1e-13, atol=1e-13)
    for one, found in zip(wanted, second.pull(x)):
        assert float((one - found).norm() / one.norm()) < 1e-12
    assert not torch.allclose(vjp.begin((other.detach(),), pull=False).values[0], expected)


def test_what_is_decided_costs_nothing_in_the_second_evaluation() -> None:
    vjp = ModuleVJP(Sorting())
    vjp.begin((drawn(),))
    assert "aten::sort" not in vjp.pullback((drawn(),)).ops()
    (derived,) = vjp._own.values()
    assert "aten::sort" in derived.deciding.ops()  # type: ignore[union-attr]
    assert all(not name.endswith("backward") for name in derived.deciding.ops())  # type: ignore[union-attr]
    assert len([node for node in derived.whole.first if op_name(node) == "aten::gather"]) == 2


def test_modules_that_differ_in_unread_attributes_share_a_derivation() -> None:
    cache: Dict[Any, Any] = {}
    first, second = ModuleVJP(Sorting(0, 1), cache=cache), ModuleVJP(Sorting(4, 2), cache=cache)
    assert first.pullback((drawn(),)) is second.pullback((drawn(),)) and len(cache) == 1
    changed = Sorting()
    changed.scale = 2.0  # type: ignore[assignment]
    assert ModuleVJP(changed, cache=cache).pullback((drawn(),)) is not first.pullback((drawn(),))


def test_decisions_come_back_as_they_were_made() -> None:
    results = [(torch.arange(3), 4), {"a": [torch.ones(2), None], "b": "text"}, torch.zeros(1)]
    found = [Decision.of(result) for result in results]
    tensors = [tensor for decision in found for tensor in decision.tensors]
    assert len(tensors) == 3
    with Deciding(found, tensors):
        again = [remember(lambda: 1 / 0) for _ in results]
    assert again[0][0] is results[0][0] and again[0][1] == 4
    assert again[1]["a"][0] is results[1]["a"][0] and again[1]["a"][1] is None and again[1]["b"] == "text"
    assert again[2] is results[2]
