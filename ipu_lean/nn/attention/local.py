"""Local attention: a token attends to the chunk it stands in and to the chunks beside it."""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch
from torch import nn

from ipu_lean.nn.attention import chunks, local_fused
from ipu_lean.nn.attention.cache import KVCache
from ipu_lean.nn.attention.chunked import as_one, checked_implementation, checked_present, checked_shape, no_mask, split
from ipu_lean.nn.attention.incremental import local_with_cache
from ipu_lean.nn.fc import FCLayer
from ipu_lean.nn.positions.rotary import Rotary, rotate
from ipu_lean.nn.precision import as_matmul_input


class LocalSelfAttention(nn.Module):
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

    def set_implementation(self, implementation: str) -> None:
        """`explicit`, `fused` or `torch`."""
        self.implementation = checked_implementation(implementation)

    def forward(
        self,
        x: torch.Tensor,
        present: Optional[torch.Tensor] = None,
        cache: Optional[KVCache] = None,
        mask: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """`[batch, seq, width] -> [batch, seq, width]`.

        Args:
            present: bool `[batch, seq]`, True where a token stands: the others are never attended to.
            cache: what is kept of earlier tokens; `x`, of any length, continues them (incremental.py).
            mask: there is none for pairs of tokens; ConfigError.

        Raises ConfigError if seq is neither a multiple of the chunk nor at most one chunk.
        """
        no_mask(mask)
        if cache is not None:
            return self.out(local_with_cache(self, x, present, cache).reshape(*x.shape[:2], -1))
        present = checked_present(present, x)
        x = as_matmul_input(x)
        layers = (self.query, self.key, self.value)
        packed = as_one(x, layers, self.heads) if self.implementation != "explicit" and self.positions is None else None
        if packed is not None and local_fused.applies(packed):
            chunks.check_length(x.shape[1], self.chunk, self.chunk, "model.local.chunk")
            return self.out(local_fused.local_attend_packed(packed, **self._options(present)).reshape(*x.shape[:2], -1))
        q, k, v = (split(layer(x), self.heads) for layer in layers) if packed is None else packed.unbind(2)
        if self.positions is not None:
            cos, sin = self.positions.rows(q, 0)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return self.out(self.attended(q, k, v, present).reshape(*x.shape[:2], -1))

    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, present: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Queries, keys and values `[batch, seq, heads, head_size]` to the attention's output in the same shape."""
        chunks.check_length(q.shape[1], self.chunk, self.chunk, "model.local.chunk")
        fused = self.implementation != "explicit" and local_fused.applies(q, k, v)
        attend = local_fused.local_attend if fused else chunks.local_attend
        return attend(q, k, v, **self._options(present))

    def _options(self, present: Optional[torch.Tensor]) -> Dict[str, Any]:
        return {
            "chunk": self.chunk,
            "before": self.before,
            "after": self.after,
            "causal": self.causal,
            "present": present,
            "scale": self.scale,
            "dropout_p": self.attention_dropout,
            "training": self.training,
        }
