"""One head's attention in chunks on CPU, forward and backward, in blocks of chunks whose scores stay in the second-level cache.

Scores are computed again in the backward pass, as in FlashAttention (Dao et al. 2022); nothing is kept of them. The gradient of a
key is added up over the windows that saw it by the matrix products themselves; there is no scatter.
"""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional, Sequence, Tuple

import torch

from ipu_lean.nn.attention.windows import Dropout, Layout, Masks, Scratch


def parts(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Tensors `[batch, seq, heads, head_size]`, given so or as one tensor `[batch, seq, parts, heads, head_size]`."""
    return inputs[0].unbind(2) if len(inputs) == 1 else inputs


class Rows(NamedTuple):
    """Of a block: queries `[chunks, chunk, head_size]`; keys and values `[chunks, window, head_size]`."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


Take = Callable[[int, int], Rows]  # of chunks first to last - 1


def forward(
    take: Take, masks: Masks, dropout: Optional[Dropout], scale: float, out: torch.Tensor, sums: Optional[torch.Tensor] = None
) -> None:
    """Writes the attention's output to `out` `[chunks, chunk, head_size]`, and to `sums` `[chunks, chunk]`, if given, the
    logarithm of the sum of exponentials of the scores, which `scale` multiplies."""
    scratch = masks.scratch
    for first, last in masks.layout.blocks(out.element_size()):
        rows = take(first, last)
        weights = _scores(rows, scale, scratch)
        masks.apply(weights, first, last)
        weights = _softmax(weights, scratch, None if sums is None else sums[first:last])
        if dropout is not None:
            weights.mul_(dropout.draw(scratch, weights.shape))
        torch.bmm(weights, rows.values, out=out[first:last])


def _scores(rows: Rows, scale: float, scratch: Scratch) -> torch.Tensor:
    scores = scratch("scores", *rows.queries.shape[:2], rows.keys.shape[1])
    return scores.baddbmm_(rows.queries, rows.keys.transpose(1, 2), beta=0, alpha=scale)


def _softmax(scores: torch.Tensor, scratch: Scratch, sums: Optional[torch.Tensor] = None) -> torch.Tensor:
    """`chunks.shares` of scores, whose buffer is free then; writes logarithms of sums of exponentials to `sums`."""
    weights = scratch("weights", *scores.shape)
    if scores.dtype == torch.float64:
        total = torch.logsumexp(scores, -1, keepdim=True)
        if sums is not None:
            sums.copy_(total.squeeze(-1))
        return torch.exp(torch.sub(scores, total, out=weights), out=weights)
    top = None if sums is None else scores.amax(-1)
    torch.softmax(scores, -1, out=weights)
    if sums is not None and top is not None:  # the largest weight is exp(top - sum)
        torch.sub(top, weights.amax(-1).log_(), out=sums)
    return weights


class Gradients(NamedTuple):
    """By place, `[chunks, chunk, head_size]`; of keys and values with the neighbours of both ends until `folded`."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor

    @staticmethod
    def empty(layout: Layout, size: int, scratch: Scratch) -> Gradients:
        """Room for them."""
        own = (layout.chunks, layout.chunk, size)
        extended = (layout.before + layout.chunks + layout.after, layout.chunk, size)
        return Gradients(scratch("to queries", *own), scratch("to keys", *extended), scratch("to values", *extended))

    def folded(self, layout: Layout) -> Gradients:
        """The neighbours' gradients added to those whom they are copies of."""
        before, chunks = layout.before, layout.chunks
        for extended in (self.keys, self.values):
            for extra in [*range(before), *range(before + chunks, before + chunks + layout.after)]:
                extended[before + (extra - before) % chunks].add_(extended[extra])
        return Gradients(self.queries, *(extended[before : before + chunks] for extended in (self.keys, self.values)))


def backward(
    take: Take,
    grads: Callable[[int, int], Tuple[torch.Tensor, torch.Tensor]],
    masks: Masks,
    dropout: Optional[Dropout],
    scale: float,
    size: int,
) -> Gradients:
    """Gradients of queries, keys and values.

    With weights P and the output's gradient g: dP = g v^T, dv = P^T g, dscores = P (dP - g.o), dq = dscores k, dk = dscores^T q.

    Args:
        scale: multiplies the scores.
        grads: for a block, g `[chunks, chunk, head_size]` (times the weight of the round), and its product with the output, g.o
            `[chunks, chunk, 1]`.
        size: features of a head.
    """
    layout, scratch = masks.layout, masks.scratch
    found = Gradients.empty(layout, size, scratch)
    looks = layout.before + layout.after
    found.keys[:looks].zero_()
    found.values[:looks].zero_()
    for first, last in layout.blocks(scratch("scores", 1).element_size()):
        rows = take(first, last)
        weights = _scores(rows, scale, scratch)
        hidden = masks.apply(weights, first, last)
        weights = _softmax(weights, scratch)
        grad, product = grads(first, last)
        to_scores = torch.bmm(grad, rows.values.transpose(1, 2), out=scratch("scores", *weights.shape))
        dropped = weights
        if dropout is not None:
            keep = dropout.draw(scratch, weights.shape)
            to_scores.mul_(keep)
            dropped = keep.mul_(weights)
        _to_keys(found.values, dropped, grad, 1.0, layout, first, last)
        to_scores.sub_(product).mul_(weights)
        if hidden is not None:
            to_scores.masked_fill_(hidden, 0.0)
        found.queries[first:last].baddbmm_(to_scores, rows.keys, beta=0, alpha=scale)
        _to_keys(found.keys, to_scores, rows.queries, scale, layout, first, last)
    return found.folded(layout)


def _to_keys(
    found: torch.Tensor, weights: torch.Tensor, queries: torch.Tensor, scale: float, layout: Layout, first: int, last: int
) -> None:
    """Adds scale weights^T queries of a block to its windows' chunks. The last chunk of a window has not been written before."""
    size, looks = layout.chunk, layout.before + layout.after
    for look in range(looks, -1, -1):
        part = weights[:, :, look * size : (look + 1) * size].transpose(1, 2)
        found[first + look : last + look].baddbmm_(part, queries, beta=0 if look == looks else 1, alpha=scale)
