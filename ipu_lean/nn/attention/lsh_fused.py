"""LSH attention on CPU with its backward pass written out: the equations of chunks.py, in blocks that fit the cache.

Of a key only its length differs from the query, so keys are made from the queries' rows once they are in the cache, and the
gradient through the length is applied once a token, after the rounds have been added up. The weights of the rounds are folded
into the output's gradient: over all rounds together this is one softmax.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch.autograd.function import once_differentiable

from ipu_lean.nn.attention import chunks
from ipu_lean.nn.attention.passes import Gradients, Rows, backward, forward, parts
from ipu_lean.nn.attention.windows import Dropout, Layout, Masks, Scratch, applies, windows

__all__ = ["applies", "lsh_attend", "lsh_attend_packed"]


def lsh_attend(
    qk: torch.Tensor, v: torch.Tensor, order: torch.Tensor, undo: torch.Tensor, terms: chunks.Terms
) -> torch.Tensor:
    """As `chunks.lsh_attend`, with other random numbers for dropout. Gradients of gradients are not offered."""
    return _LSH.apply(order, undo, terms.present, terms._replace(present=None), qk, v)


def lsh_attend_packed(packed: torch.Tensor, order: torch.Tensor, undo: torch.Tensor, terms: chunks.Terms) -> torch.Tensor:
    """The same for queries and values as one projection gives them, `[batch, seq, 2, heads, head_size]`."""
    return _LSH.apply(order, undo, terms.present, terms._replace(present=None), packed)


class _Head:
    """One head of one sequence.

    Args:
        qk, v: `[seq, head_size]`. tokens: by extended place. square: of each token's query, mean over features.
    """

    def __init__(self, qk: torch.Tensor, v: torch.Tensor, order: torch.Tensor, layout: Layout, mult: float, scratch: Scratch):
        self.qk, self.v, self.layout, self.scratch = qk, v, layout, scratch
        self.places = order.reshape(-1)
        self.tokens = layout.extended(self.places)
        self.inverse_square = _row_sums(qk, qk, scratch).div_(qk.shape[1]).add_(1e-6).reciprocal_()
        self.length = self.inverse_square.sqrt().mul_(mult * qk.shape[1] ** -0.5)
        self._lengths = self.length.index_select(0, self.tokens).unsqueeze(-1)

    def take(self, first: int, last: int) -> Rows:
        """The rows of a block."""
        size, before = self.layout.chunk, self.layout.before
        part = slice(first * size, (last + before + self.layout.after) * size)
        at = self.tokens[part]
        rows = self.scratch.rows("rows", self.qk, at)
        keys = torch.mul(rows, self._lengths[part], out=self.scratch("keys", *rows.shape))
        queries = rows[before * size : (before + last - first) * size].view(last - first, size, -1)
        values = self.scratch.rows("values", self.v, at)
        return Rows(queries, *(windows(each, self.layout, 0, last - first) for each in (keys, values)))

    def through_length(self, to_keys: torch.Tensor) -> torch.Tensor:
        """The gradient of the queries from that of the keys, `[seq, head_size]`; in place."""
        wide = self.qk.to(self.scratch.dtype)
        along = (wide * to_keys).sum(-1).mul_(self.inverse_square).div_(wide.shape[1]).unsqueeze(-1)
        return to_keys.addcmul_(wide, along, value=-1).mul_(self.length.unsqueeze(-1))


def _by_token(places: torch.Tensor, undo: torch.Tensor, weights: Optional[torch.Tensor] = None) -> torch.Tensor:
    """`[places, features]` of all rounds, (weighted and) added up by token: `[seq, features]`.

    Args: undo: place of each token in its round, `[hashes, seq]`. weights: `[hashes, seq]`.
    """
    total = None
    for number, at in enumerate(undo):
        part = places[number * undo.shape[1] : (number + 1) * undo.shape[1]].index_select(0, at)
        if weights is not None:
            part.mul_(weights[number].unsqueeze(-1))
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


class _LSH(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        order: torch.Tensor,
        undo: torch.Tensor,
        present: Optional[torch.Tensor],
        terms: chunks.Terms,
        *inputs: torch.Tensor,
    ) -> torch.Tensor:
        """`inputs`: queries and values, or both as one tensor `[batch, seq, 2, heads, head_size]`. `terms`: all but `present`."""
        qk, v = parts(inputs)
        ctx.terms, ctx.seed = terms, Dropout.seed(terms.dropout_p)
        terms = terms._replace(present=present)
        batch, heads, hashes, seq = order.shape
        layout = Layout.of(terms, hashes * seq)
        scratch, dropout = Scratch(qk), Dropout.of(terms.dropout_p, ctx.seed)
        out = torch.empty(qk.shape, dtype=v.dtype, device=v.device)
        several = hashes > 1
        shares = torch.empty(batch, heads, layout.chunks, layout.chunk, 1, dtype=scratch.dtype) if several else None
        with torch.autocast("cpu", enabled=False):
            for row in range(batch):
                of_row = terms.of_row(row)
                for head in range(heads):
                    one = _Head(qk[row, :, head], v[row, :, head], order[row, head], layout, terms.score_mult, scratch)
                    masks = Masks(of_row, layout, one.tokens, scratch, shared=True)
                    by_place = scratch("out", layout.chunks, layout.chunk, qk.shape[3])
                    sums = scratch("sums", layout.chunks, layout.chunk) if several else None
                    forward(one.take, masks, dropout, 1.0, by_place, sums)
                    weights = None
                    if sums is not None and shares is not None:
                        weights = chunks.shares(sums.view(hashes, seq).gather(1, undo[row, head]), 0)
                        shares[row, head].view(hashes, seq).copy_(weights.gather(1, order[row, head]))
                    out[row, :, head] = _by_token(by_place.view(-1, qk.shape[3]), undo[row, head], weights)
        ctx.save_for_backward(order, undo, present, out, shares, *inputs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """See passes.backward."""
        order, undo, present, out, shares, *inputs = ctx.saved_tensors
        qk, v = parts(inputs)
        terms = ctx.terms._replace(present=present)
        layout = Layout.of(terms, order.shape[2] * order.shape[3])
        scratch, dropout = Scratch(qk), Dropout.of(terms.dropout_p, ctx.seed)
        results = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
        to_qk, to_v = parts(results)
        with torch.autocast("cpu", enabled=False):
            for row in range(qk.shape[0]):
                of_row = terms.of_row(row)
                for head in range(qk.shape[2]):
                    one = _Head(qk[row, :, head], v[row, :, head], order[row, head], layout, terms.score_mult, scratch)
                    masks = Masks(of_row, layout, one.tokens, scratch, shared=True)
                    grads = _Grads(grad[row, :, head], out[row, :, head], one, None if shares is None else shares[row, head])
                    found = backward(one.take, grads, masks, dropout, 1.0, qk.shape[3])
                    queries, keys, values = _tokens_of(found, undo[row, head])
                    to_qk[row, :, head] = queries.add_(one.through_length(keys))
                    to_v[row, :, head] = values
        return (None,) * 4 + tuple(results)


def _tokens_of(found: Gradients, undo: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    """Gradients by token, `[seq, head_size]`."""
    return tuple(_by_token(part.reshape(-1, part.shape[-1]), undo) for part in found)


class _Grads:
    """The output's gradient for blocks, see passes.backward.

    Args:
        share: the weight of each round, by place, `[chunks, chunk, 1]`; None if there is one round.
    """

    def __init__(self, grad: torch.Tensor, out: torch.Tensor, head: _Head, share: Optional[torch.Tensor]) -> None:
        self._grad, self._head, self._share = grad, head, share
        layout = head.layout
        self._product = _row_sums(grad, out, head.scratch).index_select(0, head.places).view(layout.chunks, layout.chunk, 1)
        if share is not None:
            self._product.mul_(share)

    def __call__(self, first: int, last: int) -> Tuple[torch.Tensor, torch.Tensor]:
        head, size = self._head, self._head.layout.chunk
        rows = head.scratch.rows("grads", self._grad, head.places[first * size : last * size]).view(last - first, size, -1)
        if self._share is not None:
            rows.mul_(self._share[first:last])
        return rows, self._product[first:last]


def _row_sums(a: torch.Tensor, b: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Sums over features of a * b, `[tokens]`, a few rows at a time so that products do not leave the cache."""
    found = torch.empty(a.shape[0], dtype=scratch.dtype, device=a.device)
    for first in range(0, a.shape[0], 1024):
        part = slice(first, first + 1024)
        product = scratch("product", *a[part].shape)
        torch.sum(torch.mul(a[part].to(scratch.dtype), b[part], out=product), -1, out=found[part])
    return found
