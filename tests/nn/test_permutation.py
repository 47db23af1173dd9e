"""Moving rows by permutations and back: values, gradients, and what a derived backward pass is made of."""
from __future__ import annotations

from typing import Any, Tuple

import pytest
import torch

from ipu_lean.nn.attention.chunks import Terms, lsh_attend
from ipu_lean.nn.attention.permutation import into_order, out_of_order
from ipu_lean.nn.attention.sorting import bucket_order, inverse
from ipu_lean.reversible.vjp import derive

pytestmark = pytest.mark.pod
BATCH, HEADS, ROUNDS, SEQ, SIZE = 2, 3, 2, 16, 5


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orders() -> Tuple[torch.Tensor, torch.Tensor]:
    buckets = torch.randint(0, 6, (BATCH, HEADS, ROUNDS, SEQ), generator=torch.Generator().manual_seed(1))
    return bucket_order(buckets, 6)


def test_rows_go_where_they_belong_and_come_back() -> None:
    x, (order, undo) = drawn(BATCH, HEADS, SEQ, SIZE), orders()
    moved = into_order(x, order, undo).view(BATCH, HEADS, ROUNDS, SEQ, SIZE)
    for row, head, number in ((0, 1, 0), (1, 2, 1)):
        assert torch.equal(moved[row, head, number], x[row, head, order[row, head, number]])
    assert torch.equal(out_of_order(moved, order, undo), x.unsqueeze(2).expand(moved.shape))
    assert torch.equal(inverse(order, "counting"), undo) and torch.equal(inverse(order), undo)


def both(x: torch.Tensor, order: torch.Tensor, undo: torch.Tensor) -> torch.Tensor:
    rows = into_order(x, order, undo).view(BATCH, HEADS, ROUNDS, SEQ, SIZE)
    return out_of_order(rows * rows.roll(1, 3), order, undo).sum(2)


def test_gradients_are_those_of_plain_autograd() -> None:
    x, (order, undo) = drawn(BATCH, HEADS, SEQ, SIZE).requires_grad_(), orders()
    out = both(x, order, undo)
    dy = drawn(*out.shape, seed=2)
    (wanted,) = torch.autograd.grad(out, x, dy)
    found, pull = torch.func.vjp(lambda x: both(x, order, undo), x.detach())
    torch.testing.assert_close(found, out.detach(), rtol=0, atol=0)
    torch.testing.assert_close(pull(dy)[0], wanted, rtol=1e-14, atol=1e-14)


def test_gradients_of_many_at_once() -> None:
    """As batched trials take them: a gradient for each, under one transform."""
    x, (order, undo) = drawn(4, BATCH, HEADS, SEQ, SIZE), orders()
    many = torch.stack([order.roll(turn, 0) for turn in range(4)]), torch.stack([undo.roll(turn, 0) for turn in range(4)])

    def loss(x: torch.Tensor, order: torch.Tensor, undo: torch.Tensor) -> torch.Tensor:
        return both(x, order, undo).square().sum()

    found = torch.func.vmap(torch.func.grad(loss))(x, *many)
    for turn in range(4):
        one = x[turn].clone().requires_grad_()
        loss(one, many[0][turn], many[1][turn]).backward()
        torch.testing.assert_close(found[turn], one.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_derived_backward_pass_adds_nothing_up(rounds: int) -> None:
    """Gathers both ways: a scatter that adds is slow on an IPU, and wrong where its flag is ignored."""
    order, undo = (tensor[:, :, :rounds] for tensor in orders())
    qk = torch.empty(BATCH, SEQ, HEADS, SIZE, dtype=torch.float64, device="meta")

    def attend(own: Any, more: Any) -> Any:
        return (lsh_attend(*own, *more, Terms(chunk=4, before=1, after=0, causal=True)),), ()

    derived = derive(attend, (qk, qk), (order, undo))
    assert "aten::gather" in derived.ops() and not [name for name in derived.ops() if "scatter" in name or "index_put" in name]
