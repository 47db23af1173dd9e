"""Attention in chunks, written out: every chunk of queries sees its own keys and those of its neighbours.

The operations are ones that PopTorch lowers, and all shapes follow from the lengths. The masks compare original positions, so
they are right in whatever order the tokens are. Neighbours are circular: the first chunk's predecessor is the last one. As
published, a chunk that is its own neighbour is seen twice.
"""

from __future__ import annotations

from typing import NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F

from ipu_lean.errors import ConfigError
from ipu_lean.nn.attention.permutation import into_order, out_of_order

# In the place of the score of a key that must not be seen, and of a token's own key, which is seen only where nothing else is.
# Scores of 16-bit types are formed in float32, so there is one value for all types.
HIDDEN, OWN = -1e9, -1e5


class Terms(NamedTuple):
    """On what terms tokens attend to each other: what all functions for local and hashed attention are told, explicit or fused.

    Attributes:
        chunk, before, after: tokens in a chunk, and how many chunks before and after its own a chunk sees.
        causal: earlier tokens (and, as the kind of attention has it, one's own) only.
        present: bool `[batch, seq]`, True where there is a token; None: everywhere.
        score_mult: multiplies the scores.
        dropout_p: share of the attention weights that is dropped in this call: 0 outside of training.
    """

    chunk: int
    before: int
    after: int
    causal: bool
    present: Optional[torch.Tensor] = None
    score_mult: float = 1.0
    dropout_p: float = 0.0

    def of_row(self, row: int) -> Terms:
        """Those of one sequence of the batch, whose `present` is `[seq]`."""
        return self if self.present is None else self._replace(present=self.present[row])


def check_length(seq: int, chunk: int, whole: int, key: str) -> None:
    """ConfigError unless a sequence of `seq` tokens can be cut in chunks, or is at most `whole` tokens long and is not cut."""
    if seq > whole and seq % chunk:
        raise ConfigError(
            f"a sequence of {seq} tokens is not a multiple of the chunk",
            key=key,
            value=chunk,
            suggestion=f"pad it to {-(-seq // chunk) * chunk} tokens and say in `present` which of them are real",
        )


def cut(x: torch.Tensor, chunk: int, dim: int) -> torch.Tensor:
    """`[..., seq, ...] -> [..., seq / chunk, chunk, ...]`, `dim` being that of seq, counted from the front."""
    return x.reshape(*x.shape[:dim], x.shape[dim] // chunk, chunk, *x.shape[dim + 1 :])


def neighbours(x: torch.Tensor, before: int, after: int, dim: int) -> torch.Tensor:
    """`[..., chunks, chunk, ...] -> [..., chunks, (before + 1 + after) * chunk, ...]`, `dim` being that of chunks."""
    if not before and not after:
        return x
    return torch.cat([x if shift == 0 else x.roll(shift, dim) for shift in range(before, -after - 1, -1)], dim + 1)


def unit_keys(qk: torch.Tensor, score_mult: float = 1.0) -> torch.Tensor:
    """Keys of shared queries `[..., head_size]`: of length (nearly) one, whatever the query's, times `score_mult`."""
    wide = qk.float() if qk.dtype in (torch.float16, torch.bfloat16) else qk
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * (score_mult * qk.shape[-1] ** -0.5)
    return qk * scale.to(qk.dtype)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    at: torch.Tensor,
    key_at: torch.Tensor,
    terms: Terms,
    *,
    key_present: Optional[torch.Tensor],
    shared: bool,
    rounds: bool = False,
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Softmax attention of queries `[..., queries, head_size]` to keys and values `[..., keys, head_size]` as they are given.

    Args:
        at, key_at: original positions, `[..., queries]` and `[..., keys]`.
        terms: whether it is causal, and its dropout; the rest has been seen to.
        key_present: `[..., keys]`, True where there is a token.
        shared: queries and keys are one projection, so a token's own key is the last resort.

    Returns the output and, if `rounds` asks for it, the logarithm of the sum of exponentials of the scores, `[..., queries, 1]`,
    at least float32.
    """
    scores = torch.matmul(q, k.transpose(-1, -2))
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    rows, columns = at.unsqueeze(-1), key_at.unsqueeze(-2)
    if terms.causal:
        scores = scores.masked_fill(columns > rows, HIDDEN)
    if key_present is not None:
        scores = scores.masked_fill(key_present.logical_not().unsqueeze(-2), HIDDEN)
    if shared:
        scores = scores.masked_fill(columns == rows, OWN)
    total = torch.logsumexp(scores, -1, keepdim=True) if rounds else None
    weights = F.dropout(shares(scores, -1), terms.dropout_p, terms.dropout_p > 0)
    return torch.matmul(weights.to(v.dtype), v), total


def shares(scores: torch.Tensor, dim: int) -> torch.Tensor:
    """Softmax; in float64 by the logarithm of the sum, as published, so that numbers agree with other implementations to the last
    digits. In float32 that would lose a row in which all is HIDDEN or OWN: logarithms near -1e9 are 64 apart there."""
    if scores.dtype == torch.float64:
        return (scores - torch.logsumexp(scores, dim, keepdim=True)).exp()
    return scores.softmax(dim)


def lsh_attend(
    qk: torch.Tensor, v: torch.Tensor, order: torch.Tensor, undo: torch.Tensor, terms: Terms
) -> torch.Tensor:
    """Attention among tokens of like buckets, `[batch, seq, heads, head_size]` (Kitaev et al. 2020, section 2).

    Args:
        qk, v: shared queries and keys, and values, `[batch, seq, heads, head_size]`.
        order, undo: of each round of hashing, `[batch, heads, hashes, seq]` (sorting.py). The sorted rounds are laid end to end,
            and the first chunk of a round has the last one of the round before it as its neighbour.
    """
    chunk, before, after = terms.chunk, terms.before, terms.after
    batch, heads, hashes, seq = order.shape
    size = qk.shape[-1]
    places = order.reshape(batch, heads, hashes * seq)
    q = cut(into_order(qk.transpose(1, 2), order, undo), chunk, 2)
    values = neighbours(cut(into_order(v.transpose(1, 2), order, undo), chunk, 2), before, after, 2)
    keys = neighbours(unit_keys(q, terms.score_mult), before, after, 2)
    at = cut(places, chunk, 2)
    there = None
    if terms.present is not None:
        stands = torch.gather(terms.present.to(order.dtype)[:, None].expand(-1, heads, -1), 2, places)
        there = neighbours(cut(stands, chunk, 2), before, after, 2) != 0
    key_at = neighbours(at, before, after, 2)
    out, total = attend(q, keys, values, at, key_at, terms, key_present=there, shared=True, rounds=hashes > 1)
    out = out_of_order(out.reshape(batch, heads, hashes, seq, size), order, undo)
    if total is None:
        return out.squeeze(2).transpose(1, 2)
    weights = shares(out_of_order(total.reshape(batch, heads, hashes, seq, 1), order, undo), 2)
    return (out * weights).sum(2).to(v.dtype).transpose(1, 2)


def shared_attend(qk: torch.Tensor, v: torch.Tensor, terms: Terms) -> torch.Tensor:
    """The same without buckets and chunks: every token sees all others that the masks allow."""
    q, at = qk.transpose(1, 2), torch.arange(qk.shape[1], device=qk.device)
    there = None if terms.present is None else terms.present[:, None]
    keys, values = unit_keys(q, terms.score_mult), v.transpose(1, 2)
    return attend(q, keys, values, at, at, terms, key_present=there, shared=True)[0].transpose(1, 2)


def shared_by_torch(qk: torch.Tensor, v: torch.Tensor, terms: Terms) -> torch.Tensor:
    """`shared_attend` by torch's fused kernel, which keeps no scores. The masks are added, and OWN and HIDDEN are so far apart
    that nothing of the score under them matters; not for float16, which they do not fit in."""
    q, seq = qk.transpose(1, 2), qk.shape[1]
    mask = torch.zeros(seq, seq, dtype=qk.dtype, device=qk.device)
    if terms.causal:
        mask = mask.fill_(HIDDEN).triu_(1)
    if terms.present is not None:
        mask = mask.masked_fill(terms.present.logical_not()[:, None, None], HIDDEN)
    mask.diagonal(dim1=-2, dim2=-1).fill_(OWN)
    # It divides scores by sqrt(head_size) itself; torch 2.0 offers nothing else.
    keys = unit_keys(q, terms.score_mult * q.shape[-1] ** 0.5)
    return F.scaled_dot_product_attention(q, keys, v.transpose(1, 2), mask, terms.dropout_p).transpose(1, 2)


def local_attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Terms) -> torch.Tensor:
    """Attention of queries, keys and values `[batch, seq, heads, head_size]` to the chunk a token stands in and its neighbours.

    A sequence of at most one chunk is one chunk without neighbours.
    """
    batch, seq, heads, size = q.shape
    chunk, before, after = (seq, 0, 0) if seq <= terms.chunk else (terms.chunk, terms.before, terms.after)
    at = cut(torch.arange(seq, device=q.device), chunk, 0)
    queries = cut(q.transpose(1, 2), chunk, 2) * terms.score_mult
    keys, values = (neighbours(cut(x.transpose(1, 2), chunk, 2), before, after, 2) for x in (k, v))
    there = None if terms.present is None else neighbours(cut(terms.present, chunk, 1), before, after, 1)[:, None]
    key_at = neighbours(at, before, after, 0)
    out, _ = attend(queries, keys, values, at, key_at, terms, key_present=there, shared=False)
    return out.reshape(batch, heads, seq, size).transpose(1, 2)
