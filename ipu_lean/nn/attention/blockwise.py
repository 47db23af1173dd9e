"""Causal attention on CPU in blocks of queries that fit the cache, with its backward pass written out.

Scores of a block of queries are computed against the keys up to its end only, so the half that the causal mask hides is mostly
never computed, and they are computed again in the backward pass instead of kept: what is saved is q, k and v. The equations are
those of FlashAttention (Dao et al. 2022); the blocks are whole matrix products here, because on a CPU a batched product of a
few heads runs nearer to the machine's peak than a fused kernel's small ones (measured at sequence 512, 4 heads of 64, forward
and backward: 1.4 times as fast as torch's own in float32, 2 times in bfloat16).
"""

from __future__ import annotations

from typing import Any, Iterator, List, Tuple

import torch
from torch.autograd.function import once_differentiable

from ipu_lean.nn.transforms import transformed

# Added to the score of a pair that must not be seen. exp(-1e4) is 0 in float32 and float64 alike, and -2e4 (causal and padded at
# once) still fits float16; minus infinity would make NaN of a row in which everything is masked.
MASKED = -1e4


def applies(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether `blockwise_attention` takes these `[batch, seq, heads, head_size]`: on CPU, a query for each key, no transform."""
    return q.device.type == "cpu" and q.shape == k.shape and not transformed(q)


def blockwise_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale * q k^T, causal) v, all `[batch, seq, heads, head_size]`. Gradients of gradients are not offered."""
    return _Blockwise.apply(q, k, v, scale)


def _plan(q: torch.Tensor) -> Tuple[int, int, int]:
    """(queries in a block, rows of the batch in a group, heads in a group): the scores of a block stay in the second-level cache.

    Measured on Zen 4, 1 MiB a core: 64 queries and half a MiB of scores in float32, 128 and two MiB in 16 bits, whose matrix
    products want more rows. At least four heads go together, whatever the length.
    """
    batch, seq, heads, _ = q.shape
    wide = q.element_size() >= 4
    block = 64 if wide else 128
    fit = (2**19 if wide else 2**21) // (min(block, seq) * seq * q.element_size())
    together = max(4, fit)
    return block, max(1, min(batch, together // heads)), min(heads, together)


def _groups(tensors: List[torch.Tensor], rows: int, heads: int) -> Iterator[List[torch.Tensor]]:
    """The tensors cut into groups: views `[rows, heads, seq, head_size]`."""
    for row in range(0, tensors[0].shape[0], rows):
        for head in range(0, tensors[0].shape[2], heads):
            yield [tensor[row : row + rows, :, head : head + heads].transpose(1, 2) for tensor in tensors]


def _flat(group: torch.Tensor) -> torch.Tensor:
    """`[rows, heads, seq, head_size] -> [rows * heads, seq, head_size]`, a view where there is one row."""
    return group.reshape(-1, group.shape[2], group.shape[3])


def _weights(q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor, start: int) -> torch.Tensor:
    """Attention weights of the (scaled) queries q, which begin at `start` and end where the keys k do."""
    scores = torch.bmm(q, k.transpose(1, 2))
    count = q.shape[1]
    scores[:, :, start:].add_(hidden[:count, :count])
    return scores.softmax(-1)


def _diagonal(block: int, like: torch.Tensor) -> torch.Tensor:
    """The causal mask within a block, `[block, block]`."""
    return torch.full((block, block), MASKED, dtype=like.dtype, device=like.device).triu(1)


class _Blockwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """All `[batch, seq, heads, head_size]`."""
        ctx.save_for_backward(q, k, v)
        ctx.scale = scale
        block, rows, heads = _plan(q)
        seq, hidden, out = q.shape[1], _diagonal(block, q), torch.empty_like(q)
        with torch.autocast("cpu", enabled=False):
            for queries, keys, values, outs in _groups([q, k, v, out], rows, heads):
                scaled, flat_k, flat_v = _flat(queries) * scale, _flat(keys), _flat(values)
                for start in range(0, seq, block):
                    stop = min(seq, start + block)
                    weights = _weights(scaled[:, start:stop], flat_k[:, :stop], hidden, start)
                    place = outs[:, :, start:stop]
                    place.copy_(torch.bmm(weights, flat_v[:, :stop]).view(place.shape))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """With weights P and dP = dO v^T: dS = softmax's backward, dq = scale dS k, dk = scale dS^T q, dv = P^T dO."""
        q, k, v = ctx.saved_tensors
        grads = [torch.empty_like(tensor) for tensor in (q, k, v)]
        block, rows, heads = _plan(q)
        hidden = _diagonal(block, q)
        with torch.autocast("cpu", enabled=False):
            for group in _groups([q, k, v, grad, *grads], rows, heads):
                _group_backward(group, block, hidden, ctx.scale)
        return (*grads, None)


def _group_backward(group: List[torch.Tensor], block: int, hidden: torch.Tensor, scale: float) -> None:
    """Fill dq, dk, dv of one group [q, k, v, dO, dq, dk, dv], each `[rows, heads, seq, head_size]`.

    The last block goes first: it reads all keys, so its products are the whole of dk and dv and the others are added.
    """
    seq = group[0].shape[2]
    q, k, v, grad = [_flat(tensor) for tensor in group[:4]]
    q = q * scale
    grad_q, grad_k, grad_v = group[4:]
    sum_k = sum_v = None
    for start in range((seq - 1) // block * block, -1, -block):
        stop = min(seq, start + block)
        rows, out = q[:, start:stop], grad[:, start:stop]
        weights = _weights(rows, k[:, :stop], hidden, start)
        to_weights = torch.bmm(out, v[:, :stop].transpose(1, 2))
        to_scores = torch._softmax_backward_data(to_weights, weights, -1, weights.dtype)
        place = grad_q[:, :, start:stop]
        place.copy_(torch.bmm(to_scores, k[:, :stop]).mul_(scale).view(place.shape))
        if sum_k is None or sum_v is None:
            sum_k, sum_v = torch.bmm(to_scores.transpose(1, 2), rows), torch.bmm(weights.transpose(1, 2), out)
        else:
            sum_k[:, :stop].baddbmm_(to_scores.transpose(1, 2), rows)
            sum_v[:, :stop].baddbmm_(weights.transpose(1, 2), out)
    grad_k.copy_(sum_k.view(grad_k.shape))
    grad_v.copy_(sum_v.view(grad_v.shape))
