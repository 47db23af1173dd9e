"""Attention in chunks, written out: every chunk of queries sees its own keys and those of its neighbours.

The operations are ones that PopTorch lowers, and all shapes follow from the lengths. The masks compare original positions, so
they are right in whatever order the tokens are. Neighbours are circular: the first chunk's predecessor is the last one. As
published, a chunk that is its own neighbour is seen twice.
"""

from __future__ import annotations

from typing import Optional, Tuple

import torch
import torch.nn.functional as F

from ipu_lean.errors import ConfigError
from ipu_lean.nn.attention.permutation import into_order, out_of_order

# In the place of the score of a key that must not be seen, and of a token's own key, which is seen only where nothing else is.
# Scores of 16-bit types are formed in float32, so there is one value for all types.
HIDDEN, OWN = -1e9, -1e5


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
    *,
    causal: bool,
    shared: bool,
    key_present: Optional[torch.Tensor],
    dropout_p: float,
    training: bool,
    rounds: bool = False,
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """Softmax attention of queries `[..., queries, head_size]` to keys and values `[..., keys, head_size]`.

    Args:
        at, key_at: original positions, `[..., queries]` and `[..., keys]`.
        shared: queries and keys are one projection, so a token's own key is the last resort.
        key_present: `[..., keys]`, True where there is a token.

    Returns the output and, if `rounds` asks for it, the logarithm of the sum of exponentials of the scores, `[..., queries, 1]`,
    at least float32.
    """
    scores = torch.matmul(q, k.transpose(-1, -2))
    if scores.dtype in (torch.float16, torch.bfloat16):
        scores = scores.float()
    rows, columns = at.unsqueeze(-1), key_at.unsqueeze(-2)
    if causal:
        scores = scores.masked_fill(columns > rows, HIDDEN)
    if key_present is not None:
        scores = scores.masked_fill(key_present.logical_not().unsqueeze(-2), HIDDEN)
    if shared:
        scores = scores.masked_fill(columns == rows, OWN)
    total = torch.logsumexp(scores, -1, keepdim=True) if rounds else None
    weights = F.dropout(shares(scores, -1), dropout_p, training and dropout_p > 0)
    return torch.matmul(weights.to(v.dtype), v), total


def shares(scores: torch.Tensor, dim: int) -> torch.Tensor:
    """Softmax; in float64 by the logarithm of the sum, as published, so that numbers agree with other implementations to the last
    digits. In float32 that would lose a row in which all is HIDDEN or OWN: logarithms near -1e9 are 64 apart there."""
    if scores.dtype == torch.float64:
        return (scores - torch.logsumexp(scores, dim, keepdim=True)).exp()
    return scores.softmax(dim)


def lsh_attend(
    qk: torch.Tensor,
    v: torch.Tensor,
    order: torch.Tensor,
    undo: torch.Tensor,
    *,
    chunk: int,
    before: int,
    after: int,
    causal: bool,
    present: Optional[torch.Tensor] = None,
    score_mult: float = 1.0,
    dropout_p: float = 0.0,
    training: bool = False,
) -> torch.Tensor:
    """Attention among tokens of like buckets, `[batch, seq, heads, head_size]` (Kitaev et al. 2020, section 2).

    Args:
        qk, v: shared queries and keys, and values, `[batch, seq, heads, head_size]`.
        order, undo: of each round of hashing, `[batch, heads, hashes, seq]` (sorting.py). The sorted rounds are laid end to end,
            and the first chunk of a round has the last one of the round before it as its neighbour.
        present: bool `[batch, seq]`, True where there is a token.
        dropout_p: share of the attention weights dropped if `training`.
    """
    batch, heads, hashes, seq = order.shape
    size = qk.shape[-1]
    places = order.reshape(batch, heads, hashes * seq)
    q = cut(into_order(qk.transpose(1, 2), order, undo), chunk, 2)
    values = neighbours(cut(into_order(v.transpose(1, 2), order, undo), chunk, 2), before, after, 2)
    keys = neighbours(unit_keys(q, score_mult), before, after, 2)
    at = cut(places, chunk, 2)
    there = None
    if present is not None:
        stands = torch.gather(present.to(order.dtype)[:, None].expand(-1, heads, -1), 2, places)
        there = neighbours(cut(stands, chunk, 2), before, after, 2) != 0
    out, total = attend(
        q,
        keys,
        values,
        at,
        neighbours(at, before, after, 2),
        causal=causal,
        shared=True,
        key_present=there,
        dropout_p=dropout_p,
        training=training,
        rounds=hashes > 1,
    )
    out = out_of_order(out.reshape(batch, heads, hashes, seq, size), order, undo)
    if total is None:
        return out.squeeze(2).transpose(1, 2)
    weights = shares(out_of_order(total.reshape(batch, heads, hashes, seq, 1), order, undo), 2)
    return (out * weights).sum(2).to(v.dtype).transpose(1, 2)


def shared_attend(
    qk: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    present: Optional[torch.Tensor] = None,
    score_mult: float = 1.0,
    dropout_p: float = 0.0,
    training: bool = False,
) -> torch.Tensor:
    """The same without buckets: every token sees all others that the masks allow, `[batch, seq, heads, head_size]`."""
    q, at = qk.transpose(1, 2), torch.arange(qk.shape[1], device=qk.device)
    there = None if present is None else present[:, None]
    keys, values = unit_keys(q, score_mult), v.transpose(1, 2)
    masks = {"causal": causal, "shared": True, "key_present": there}
    return attend(q, keys, values, at, at, dropout_p=dropout_p, training=training, **masks)[0].transpose(1, 2)


def shared_by_torch(
    qk: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    present: Optional[torch.Tensor] = None,
    score_mult: float = 1.0,
    dropout_p: float = 0.0,
    training: bool = False,
) -> torch.Tensor:
    """`shared_attend` by torch's fused kernel, which keeps no scores. The masks are added, and OWN and HIDDEN are so far apart
    that nothing of the score under them matters; not for float16, which they do not fit in."""
    q, seq = qk.transpose(1, 2), qk.shape[1]
    mask = torch.zeros(seq, seq, dtype=qk.dtype, device=qk.device)
    if causal:
        mask = mask.fill_(HIDDEN).triu_(1)
    if present is not None:
        mask = mask.masked_fill(present.logical_not()[:, None, None], HIDDEN)
    mask.diagonal(dim1=-2, dim2=-1).fill_(OWN)
    # It divides scores by sqrt(head_size) itself; torch 2.0 offers nothing else.
    keys = unit_keys(q, score_mult * q.shape[-1] ** 0.5)
    out = F.scaled_dot_product_attention(q, keys, v.transpose(1, 2), mask, dropout_p if training else 0.0)
    return out.transpose(1, 2)


def local_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    chunk: int,
    before: int,
    after: int,
    causal: bool,
    present: Optional[torch.Tensor] = None,
    scale: float = 1.0,
    dropout_p: float = 0.0,
    training: bool = False,
) -> torch.Tensor:
    """Attention to the chunk a token stands in and its neighbours, `[batch, seq, heads, head_size]`.

    Args:
        q, k, v: `[batch, seq, heads, head_size]`. scale: multiplies the scores.
        present: bool `[batch, seq]`, True where there is a token.
        A sequence of at most one chunk is one chunk without neighbours.
    """
    batch, seq, heads, size = q.shape
    if seq <= chunk:
        chunk, before, after = seq, 0, 0
    at = cut(torch.arange(seq, device=q.device), chunk, 0)
    queries = cut(q.transpose(1, 2), chunk, 2) * scale
    keys, values = (neighbours(cut(x.transpose(1, 2), chunk, 2), before, after, 2) for x in (k, v))
    there = None if present is None else neighbours(cut(present, chunk, 1), before, after, 1)[:, None]
    masks = {"causal": causal, "shared": False, "key_present": there}
    out, _ = attend(queries, keys, values, at, neighbours(at, before, after, 0), dropout_p=dropout_p, training=training, **masks)
    return out.reshape(batch, heads, seq, size).transpose(1, 2)
