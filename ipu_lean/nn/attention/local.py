"""Local attention: a token attends to the chunk it stands in and to the chunks beside it."""

from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import nn

from ipu_lean.nn.attention import chunks, local_fused
from ipu_lean.nn.attention.cache import KVCache
from ipu_lean.nn.attention.chunked import ChunkedSelfAttention, checked_shape
from ipu_lean.nn.attention.incremental import local_with_cache
from ipu_lean.nn.fc import FCLayer
from ipu_lean.nn.positions.rotary import Rotary


class LocalSelfAttention(ChunkedSelfAttention):
    """`[batch, seq, width] -> [batch, seq, width]`: softmax(scale * q k^T) v among neighbouring chunks, then a projection.

    Its cost grows with seq. As published, neighbours are circular: without `causal` the first chunk sees the last one.

    Args:
        width, heads, head_size: heads x head_size features inside (None: width / heads).
        chunk, before, after: tokens in a chunk, and how many chunks before and after its own a chunk sees.
        causal: attend to earlier positions and one's own only.
        scale: multiplies the scores; None: 1/sqrt(head_size).
        attention_dropout, dropout: shares of the attention weights and of the output dropped in training.
        implementation: `explicit` (PopTorch can trace it) or `fused` (the fastest at hand); `torch` is the same as `fused` here.
        query_zero_init: the query's matrix starts at zero.
        positions: rotary positions for queries and keys.
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
        causal: bool = True,
        scale: Optional[float] = None,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        implementation: str = "fused",
        bias: bool = False,
        init_scale: float = 1.0,
        query_zero_init: bool = False,
        mult: float = 1.0,
        positions: Optional[Rotary] = None,
    ) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.head_size = checked_shape(width, heads, head_size, chunk, before, after, "model.local")
        self.chunk, self.before, self.after, self.causal = chunk, before, after, causal
        self.scale = self.head_size**-0.5 if scale is None else float(scale)
        self.positions, self.attention_dropout = positions, attention_dropout
        inner = heads * self.head_size
        self.query = FCLayer(width, inner, bias=bias, init_scale=init_scale, zero_init=query_zero_init)
        self.key = FCLayer(width, inner, bias=bias, init_scale=init_scale)
        self.value = FCLayer(width, inner, bias=bias, init_scale=init_scale)
        self.out = FCLayer(inner, width, dropout=dropout, bias=bias, init_scale=init_scale, mult=mult)
        self.set_implementation(implementation)

    @property
    def projections(self) -> Tuple[nn.Module, ...]:  # type: ignore[override]
        """Into queries, keys and values."""
        return self.query, self.key, self.value

    def attended(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        present: Optional[torch.Tensor] = None,
        packed: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Queries, keys and values `[batch, seq, heads, head_size]` to the attention's output in the same shape; `packed`
        `[batch, seq, 3, heads, head_size]`: all three, if they are parts of one tensor."""
        chunks.check_length(q.shape[1], self.chunk, self.chunk, "model.local.chunk")
        terms = self.terms(present, self.scale)
        if self.implementation == "explicit" or not local_fused.applies(q, k, v):
            return chunks.local_attend(q, k, v, terms)
        return local_fused.local_attend(q, k, v, terms) if packed is None else local_fused.local_attend_packed(packed, terms)

    def continued(self, x: torch.Tensor, present: Optional[torch.Tensor], cache: KVCache) -> torch.Tensor:
        """See incremental.py."""
        return local_with_cache(self, x, present, cache)
