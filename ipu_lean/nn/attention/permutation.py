"""Moving tokens into the order of their buckets and back. The inverse is at hand, so the gradient is moved, not added up.

PyTorch's and PopART's derivative of a gather is a scatter that adds, because they cannot know that no row comes twice. Where
`torch.func` derives a backward pass as operations (reversible/vjp.py), gradients go by the inverse permutation instead. Elsewhere
these are plain gathers: PopTorch would not see a backward pass written in Python.
"""

from __future__ import annotations

from typing import Any, Tuple

import torch

from ipu_lean.nn.transforms import transformed


class _Rearranged(torch.autograd.Function):
    """Rows of x `[..., seq, size]` in an order `[..., seq]`, whose inverse is `undo`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, order: torch.Tensor, undo: torch.Tensor) -> torch.Tensor:
        return torch.gather(x, -2, order.unsqueeze(-1).expand(x.shape))

    @staticmethod
    def setup_context(ctx: Any, inputs: Tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[1], inputs[2])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[torch.Tensor, None, None]:
        order, undo = ctx.saved_tensors
        return _Rearranged.apply(gradient, undo, order), None, None


def into_order(x: torch.Tensor, order: torch.Tensor, undo: torch.Tensor) -> torch.Tensor:
    """`[batch, heads, seq, size] -> [batch, heads, hashes * seq, size]`: the rows in the order of each round, end to end.

    Args:
        order, undo: `[batch, heads, hashes, seq]`, inverse to each other (sorting.py).
    """
    batch, heads, hashes, seq = order.shape
    size = x.shape[-1]
    if transformed(x):
        rounds = x.unsqueeze(2).expand(batch, heads, hashes, seq, size)
        return _Rearranged.apply(rounds, order, undo).reshape(batch, heads, hashes * seq, size)
    places = order.reshape(batch, heads, hashes * seq)
    return torch.gather(x, 2, places.unsqueeze(-1).expand(-1, -1, -1, size))


def out_of_order(x: torch.Tensor, order: torch.Tensor, undo: torch.Tensor) -> torch.Tensor:
    """`[batch, heads, hashes, seq, size]` in the order of each round -> the same by position."""
    if transformed(x):
        return _Rearranged.apply(x, undo, order)
    return torch.gather(x, 3, undo.unsqueeze(-1).expand(x.shape))
