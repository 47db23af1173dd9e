"""Local attention on CPU with its backward pass written out: the equations of chunks.py, in blocks for the cache (passes.py)."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch.autograd.function import once_differentiable

from ipu_lean.nn.attention.chunks import Terms
from ipu_lean.nn.attention.passes import Rows, Take, backward, forward, parts
from ipu_lean.nn.attention.windows import Dropout, Layout, Masks, Scratch, applies, windows

__all__ = ["applies", "local_attend", "local_attend_packed"]


def local_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Terms) -> torch.Tensor:
    """As `chunks.local_attend`, with other random numbers for dropout. Gradients of gradients are not offered."""
    return _Local.apply(terms.present, terms._replace(present=None), q, k, v)


def local_attend_packed(packed: torch.Tensor, terms: Terms) -> torch.Tensor:
    """The same for queries, keys and values as one projection gives them, `[batch, seq, 3, heads, head_size]`."""
    return _Local.apply(terms.present, terms._replace(present=None), packed)


def _layout(seq: int, terms: Terms) -> Layout:
    return Layout(seq, 0, 0, 1) if seq <= terms.chunk else Layout.of(terms, seq)


class _Heads:
    """What the heads of a sequence have in common."""

    def __init__(self, seq: int, terms: Terms, scratch: Scratch) -> None:
        layout = _layout(seq, terms)
        self.layout, self.scratch = layout, scratch
        self.tokens = layout.extended(torch.arange(seq))
        self.masks = Masks(terms, layout, self.tokens, scratch, shared=False, in_order=True)

    def chunks(self, x: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Chunks first to last - 1 of `x` `[seq, head_size]`, `[last - first, chunk, head_size]`, in the wider type."""
        size = self.layout.chunk
        rows = x[first * size : last * size]
        rows = rows if x.dtype == self.scratch.dtype else rows.to(self.scratch.dtype)
        return rows.unflatten(0, (last - first, size))

    def windows(self, name: str, x: torch.Tensor, first: int, last: int) -> torch.Tensor:
        """Their windows, `[last - first, window, head_size]`: views, unless they reach around the ends."""
        layout, size = self.layout, self.layout.chunk
        if layout.before <= first and last <= layout.chunks - layout.after and x.dtype == self.scratch.dtype:
            start = x.storage_offset() + (first - layout.before) * size * x.stride(0)
            return x.as_strided((last - first, layout.window, x.shape[1]), (size * x.stride(0), *x.stride()), start)
        at = self.tokens[first * size : (last + layout.before + layout.after) * size]
        return windows(self.scratch.rows(name, x, at), layout, 0, last - first)

    def take(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Take:
        """The rows of blocks of one head, from `[seq, head_size]` each."""

        def rows(first: int, last: int) -> Rows:
            return Rows(self.chunks(q, first, last), self.windows("keys", k, first, last), self.windows("values", v, first, last))

        return rows


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, present: Optional[torch.Tensor], terms: Terms, *inputs: torch.Tensor) -> torch.Tensor:
        """`inputs`: queries, keys, values, or the three as one tensor `[batch, seq, 3, heads, head_size]`. `terms`: all but
        `present`."""
        ctx.terms, ctx.seed = terms, Dropout.seed(terms.dropout_p)
        terms = terms._replace(present=present)
        q, k, v = parts(inputs)
        scratch, dropout = Scratch(q), Dropout.of(terms.dropout_p, ctx.seed)
        batch, seq, heads, size = q.shape
        out = torch.empty(q.shape, dtype=v.dtype, device=v.device)
        with torch.autocast("cpu", enabled=False):
            for row in range(batch):
                every = _Heads(seq, terms.of_row(row), scratch)
                for head in range(heads):
                    take = every.take(*(x[row, :, head] for x in (q, k, v)))
                    found = scratch("out", every.layout.chunks, every.layout.chunk, size)
                    forward(take, every.masks, dropout, terms.score_mult, found)
                    out[row, :, head] = found.view(-1, size)
        ctx.save_for_backward(present, out, *inputs)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """See passes.backward."""
        present, out, *inputs = ctx.saved_tensors
        terms = ctx.terms._replace(present=present)
        q, k, v = parts(inputs)
        scratch, dropout = Scratch(q), Dropout.of(terms.dropout_p, ctx.seed)
        results = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
        places = parts(results)
        with torch.autocast("cpu", enabled=False):
            for row in range(q.shape[0]):
                every = _Heads(q.shape[1], terms.of_row(row), scratch)
                for head in range(q.shape[2]):
                    take = every.take(*(x[row, :, head] for x in (q, k, v)))
                    grads = _Grads(grad[row, :, head], out[row, :, head], every)
                    found = backward(take, grads, every.masks, dropout, terms.score_mult, q.shape[3])
                    for place, part in zip(places, found):
                        place[row, :, head] = part.reshape(-1, q.shape[3])
        return (None,) * 2 + tuple(results)


class _Grads:
    """The output's gradient for blocks, see passes.backward; `[seq, head_size]` both."""

    def __init__(self, grad: torch.Tensor, out: torch.Tensor, every: _Heads) -> None:
        self._grad, self._out, self._every = grad, out, every

    def __call__(self, first: int, last: int) -> Tuple[torch.Tensor, torch.Tensor]:
        grad, out = (self._every.chunks(x, first, last) for x in (self._grad, self._out))
        product = torch.mul(grad, out, out=self._every.scratch("product", *grad.shape))
        return grad, product.sum(-1, keepdim=True)
