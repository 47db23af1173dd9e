"""LSH attention (Kitaev et al. 2020, "Reformer"): a token attends to those whose hashes are like its own."""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.nn.attention import chunks, lsh_fused
from ipu_lean.nn.attention.cache import KVCache
from ipu_lean.nn.attention.chunked import ChunkedSelfAttention, checked_shape
from ipu_lean.nn.attention.hashing import Buckets, Rotations, bucket_factors, columns_needed, hash_buckets
from ipu_lean.nn.attention.incremental import lsh_with_cache
from ipu_lean.nn.attention.sorting import bucket_order, inverse
from ipu_lean.nn.fc import FCLayer
from ipu_lean.nn.positions.rotary import Rotary
from ipu_lean.nn.transforms import transformed


class LSHSelfAttention(ChunkedSelfAttention):
    """`[batch, seq, width] -> [batch, seq, width]`: shared queries and keys, sorted by random hashes and attended in chunks.

    Its cost grows with seq log seq instead of seq squared. No weight is ever put on the future in a causal one; but which of the
    past tokens share a chunk depends on all tokens, so outputs can change (a little) with later tokens, as published.

    Args:
        width, heads, head_size: heads x head_size features inside (None: width / heads).
        chunk, before, after: tokens in a chunk, and how many chunks before and after its own a chunk sees (circular).
        hashes: rounds of hashing; see `set_hashes`.
        buckets: their number, or its factors, even; None: by the length of each sequence, about two a chunk.
        seq: the longest sequence.
        causal: attend to earlier positions only.
        score_mult: multiplies the scores, whose keys are of unit length.
        attention_dropout, dropout: shares of the attention weights and of the output dropped in training.
        implementation: `explicit` (PopTorch can trace it) or `fused` (the fastest at hand); `torch` is the same as `fused` here.
        full_below: sequences up to this length are not hashed, all pairs are computed (None: one chunk).
        positions: rotary positions for queries and keys.
        seed, layer: of the random rotations; see `redraw`.
        remember: keeps the order of a call for its second run in a recomputed stack (`reversible.remember`); None: the order is
            always computed.
        sorting: `sort`, or `counting` where sorts are not stable (IPUs).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_size: Optional[int] = None,
        *,
        chunk: int = 64,
        before: int = 1,
        after: int = 0,
        hashes: int = 1,
        buckets: Buckets = None,
        seq: int,
        causal: bool = True,
        score_mult: float = 1.0,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        implementation: str = "fused",
        bias: bool = False,
        init_scale: float = 1.0,
        mult: float = 1.0,
        seed: int = 0,
        layer: int = 0,
        full_below: Optional[int] = None,
        positions: Optional[Rotary] = None,
        remember: Optional[Callable[[Callable[[], Any]], Any]] = None,
        sorting: str = "sort",
    ) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.head_size = checked_shape(width, heads, head_size, chunk, before, after, "model.lsh")
        self.chunk, self.before, self.after, self.buckets, self.seq = chunk, before, after, buckets, seq
        self.causal, self.score_mult, self.attention_dropout = causal, float(score_mult), attention_dropout
        self.full_below = max(chunk, full_below or 0)
        self.positions, self.remember, self.sorting = positions, remember, sorting
        inner = heads * self.head_size
        self.query_key = FCLayer(width, inner, bias=bias, init_scale=init_scale)
        self.value = FCLayer(width, inner, bias=bias, init_scale=init_scale)
        self.out = FCLayer(inner, width, dropout=dropout, bias=bias, init_scale=init_scale, mult=mult)
        columns = columns_needed(seq, chunk, buckets)
        self.hashing = Rotations(heads, self.head_size, _checked_hashes(hashes), columns, seed, layer)
        self.set_implementation(implementation)

    @property
    def projections(self) -> Tuple[nn.Module, ...]:  # type: ignore[override]
        """Into shared queries and keys, and values."""
        return self.query_key, self.value

    @property
    def rotations(self) -> torch.Tensor:
        """The buffer `[heads, head_size, hashes, columns]`."""
        return self.hashing.rotations

    @property
    def hashes(self) -> int:
        """Rounds of hashing."""
        return self.hashing.hashes

    def set_hashes(self, hashes: int) -> None:
        """Another number of rounds from the next call on (more of them in evaluation find more of the pairs). The rotations of
        the rounds that were there stay."""
        self.hashing.set_hashes(_checked_hashes(hashes))

    def redraw(self, step: int) -> None:
        """The rotations of update `step`, by (seed, layer, step) alone."""
        self.hashing.redraw(step)

    def attended(
        self,
        qk: torch.Tensor,
        v: torch.Tensor,
        present: Optional[torch.Tensor] = None,
        packed: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Queries and values `[batch, seq, heads, head_size]` to the attention's output in the same shape; `packed`
        `[batch, seq, 2, heads, head_size]`: both, if they are parts of one tensor."""
        seq = qk.shape[1]
        chunks.check_length(seq, self.chunk, self.full_below, "model.lsh.chunk")
        terms = self.terms(present, self.score_mult)
        explicit = self.implementation == "explicit"
        if seq <= self.full_below:
            by_torch = not explicit and qk.dtype != torch.float16 and not transformed(qk)
            return (chunks.shared_by_torch if by_torch else chunks.shared_attend)(qk, v, terms)
        order, undo = self.order_of(qk, present)
        if explicit or not lsh_fused.applies(qk, v):
            return chunks.lsh_attend(qk, v, order, undo, terms)
        if packed is None:
            return lsh_fused.lsh_attend(qk, v, order, undo, terms)
        return lsh_fused.lsh_attend_packed(packed, order, undo, terms)

    def continued(self, x: torch.Tensor, present: Optional[torch.Tensor], cache: KVCache) -> torch.Tensor:
        """See incremental.py."""
        return lsh_with_cache(self, x, present, cache)

    def order_of(self, qk: torch.Tensor, present: Optional[torch.Tensor]) -> Tuple[torch.Tensor, torch.Tensor]:
        """(order, undo) `[batch, heads, hashes, seq]` of this call; in a second run those of the first."""
        if self.remember is None:
            return self._order(qk, present)
        # Remembered for each layer while a deep stack is not: so one small integer a token, head and round.
        kept = torch.int16 if qk.shape[1] <= 2**15 else torch.int32
        order = self.remember(lambda: self._order(qk, present)[0].to(kept)).long()
        return order, inverse(order, self.sorting)

    def _order(self, qk: torch.Tensor, present: Optional[torch.Tensor]) -> Tuple[torch.Tensor, torch.Tensor]:
        if qk.shape[1] > self.seq:
            raise ConfigError(f"a sequence of {qk.shape[1]} tokens is longer than the context", key="model.seq", value=self.seq)
        with torch.no_grad():
            factors = bucket_factors(qk.shape[1], self.chunk, self.buckets, self.seq)
            return bucket_order(*hash_buckets(qk, self.hashing.like(qk), factors, present), method=self.sorting)


def _checked_hashes(hashes: int) -> int:
    if hashes < 1:
        raise ConfigError("there is at least one round of hashing", key="model.lsh.hashes", value=hashes)
    return hashes
