"""Causal attention on CPU in blocks of queries that fit the cache, with its backward pass written out.

Scores of a block of queries are computed against the keys up to its end only, so the half that the causal mask hides is mostly
never computed, and they are computed again in the backward pass instead of kept: what is saved is q, k and v as the projections
gave them (rotary positions are applied in here, while they are in the cache). The equations are those of FlashAttention (Dao et
al. 2022); the blocks are whole matrix products, because on a CPU a batched product of a few heads runs nearer to the machine's
peak than a fused kernel's small ones; `benchmarks/attention.py` measures it beside torch's own.
"""

from __future__ import annotations

from typing import Any, Iterator, List, Optional, Tuple

import torch
from torch.autograd.function import once_differentiable

from ipu_lean.nn.positions.rotary import rotate

# Added to the score of a pair that must not be seen. exp(-1e4) is 0 in float32 and float64 alike, and -2e4 (causal and padded at
# once) still fits float16; minus infinity would make NaN of a row in which everything is masked.
MASKED = -1e4


Turns = Tuple[torch.Tensor, torch.Tensor]


def worthwhile(seq: int, bytes_each: int) -> bool:
    """Whether blocks beat torch's kernel: in 16 bits at every length measured (128 to 2048), in float32 in the middle of them."""
    return bytes_each < 4 or 256 <= seq <= 1024


def blockwise_attention(packed: torch.Tensor, turns: Optional[Turns], scale: float) -> torch.Tensor:
    """softmax(scale * q k^T, causal) v of `packed` = [q, k, v], `[batch, seq, 3, heads, head_size]`, on CPU.

    Args:
        turns: (cos, sin) of rotary positions as `Rotary.rows` gives them; queries and keys are turned by them first.

    Returns `[batch, seq, heads, head_size]`. Gradients of gradients are not offered.
    """
    cos, sin = (None, None) if turns is None else turns
    return _Blockwise.apply(packed, cos, sin, scale)


def plan(batch: int, seq: int, heads: int, bytes_each: int) -> Tuple[int, int, int]:
    """(queries in a block, rows of the batch in a group, heads in a group): the scores of a block stay in the second-level cache.

    Measured on Zen 4, 1 MiB a core: 64 queries and half a MiB of scores in float32, 128 and two MiB in 16 bits, whose matrix
    products want more rows. At least four heads go together, whatever the length.
    """
    block = 64 if bytes_each >= 4 else 128
    fit = (2**19 if bytes_each >= 4 else 2**21) // (min(block, seq) * seq * bytes_each)
    together = max(4, fit)
    return block, max(1, min(batch, together // heads)), min(heads, together)


def _plan(packed: torch.Tensor) -> Tuple[int, int, int]:
    batch, seq, _, heads, _ = packed.shape
    return plan(batch, seq, heads, packed.element_size())


def _groups(rows: int, heads: int, packed: torch.Tensor, *others: torch.Tensor) -> Iterator[List[torch.Tensor]]:
    """Groups of `[batch, seq, 3, heads, head_size]` as views `[3, rows, heads, seq, head_size]`, of the others without the 3."""
    for row in range(0, packed.shape[0], rows):
        for head in range(0, packed.shape[3], heads):
            tensors = [tensor[row : row + rows, ..., head : head + heads, :] for tensor in (packed, *others)]
            yield [t.permute(2, 0, 3, 1, 4) if t.dim() == 5 else t.transpose(1, 2) for t in tensors]


def _flat(group: torch.Tensor) -> torch.Tensor:
    """`[rows, heads, seq, head_size] -> [rows * heads, seq, head_size]`, a view where there is one row."""
    return group.reshape(-1, group.shape[2], group.shape[3])


def _prepare(group: torch.Tensor, turns: Optional[Turns], scale: float) -> List[torch.Tensor]:
    """Turned and scaled queries, turned keys, values of a group, `[rows * heads, seq, head_size]` each."""
    flat = group.reshape(3, -1, group.shape[3], group.shape[4])
    if turns is None:
        return [flat[0] * scale, flat[1], flat[2]]
    turned = rotate(flat[:2], *turns)
    return [turned[0].mul_(scale), turned[1], flat[2]]


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
    def forward(
        ctx: Any, packed: torch.Tensor, cos: Optional[torch.Tensor], sin: Optional[torch.Tensor], scale: float
    ) -> torch.Tensor:
        """See `blockwise_attention`."""
        ctx.save_for_backward(packed, cos, sin)
        ctx.scale = scale
        turns = None if cos is None or sin is None else (cos[:, 0], sin[:, 0])
        block, rows, heads = _plan(packed)
        batch, seq, _, all_heads, size = packed.shape
        hidden, out = _diagonal(block, packed), packed.new_empty(batch, seq, all_heads, size)
        with torch.autocast("cpu", enabled=False):
            for group, outs in _groups(rows, heads, packed, out):
                q, k, v = _prepare(group, turns, scale)
                for start in range(0, seq, block):
                    stop = min(seq, start + block)
                    place = outs[:, :, start:stop]
                    weights = _weights(q[:, start:stop], k[:, :stop], hidden, start)
                    place.copy_(torch.bmm(weights, v[:, :stop]).view(place.shape))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """With weights P and dP = dO v^T: dS = softmax's backward, dq = scale dS k, dk = dS^T (scale q), dv = P^T dO."""
        packed, cos, sin = ctx.saved_tensors
        turns = None if cos is None else (cos[:, 0], sin[:, 0])
        found = torch.empty_like(packed, memory_format=torch.contiguous_format)
        block, rows, heads = _plan(packed)
        hidden = _diagonal(block, packed)
        with torch.autocast("cpu", enabled=False):
            for group, place, outs in _groups(rows, heads, packed, found, grad):
                q, k, v = _prepare(group, turns, ctx.scale)
                to_qk, to_v = _group_backward(q, k, v, _flat(outs), block, hidden)
                to_qk[0].mul_(ctx.scale)
                if turns is not None:
                    to_qk = rotate(to_qk, turns[0], -turns[1])  # a rotation's transpose turns the other way
                place[:2].copy_(to_qk.view(place[:2].shape))
                place[2].copy_(to_v.view(place[2].shape))
        return found, None, None, None


def _group_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, block: int, hidden: torch.Tensor
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Gradients ([scaled q, k], v) of one group from that of its output, all `[rows * heads, seq, head_size]`.

    The last block goes first: it reads all keys, so its products are the whole of dk and dv and the others are added.
    """
    seq = q.shape[1]
    to_qk, to_v = q.new_empty((2, *q.shape)), torch.empty_like(v)
    to_q, to_k = to_qk
    for start in range((seq - 1) // block * block, -1, -block):
        stop = min(seq, start + block)
        rows, out = q[:, start:stop], grad[:, start:stop]
        weights = _weights(rows, k[:, :stop], hidden, start)
        to_weights = torch.bmm(out, v[:, :stop].transpose(1, 2))
        to_scores = torch._softmax_backward_data(to_weights, weights, -1, weights.dtype)
        to_q[:, start:stop] = torch.bmm(to_scores, k[:, :stop])
        if stop == seq:
            torch.bmm(to_scores.transpose(1, 2), rows, out=to_k)
            torch.bmm(weights.transpose(1, 2), out, out=to_v)
        else:
            to_k[:, :stop].baddbmm_(to_scores.transpose(1, 2), rows)
            to_v[:, :stop].baddbmm_(weights.transpose(1, 2), out)
    return to_qk, to_v
