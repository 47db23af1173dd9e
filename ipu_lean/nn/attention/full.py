"""Self-attention over the whole context: written out for PopTorch or by the fastest kernel at hand, with equal numbers."""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.nn.attention import blockwise
from ipu_lean.nn.attention.blockwise import MASKED
from ipu_lean.nn.attention.cache import KVCache
from ipu_lean.nn.dropout import dropped
from ipu_lean.nn.fc import FCLayer
from ipu_lean.nn.linear import Linear
from ipu_lean.nn.positions.rotary import Rotary, rotate
from ipu_lean.nn.precision import as_matmul_input
from ipu_lean.nn.transforms import transformed

IMPLEMENTATIONS = ("explicit", "fused", "torch")


class CausalSelfAttention(nn.Module):
    """`[batch, seq, width] -> [batch, seq, width]`: softmax(scale * q k^T, causal) v, then an output projection.

    Args:
        width, heads: a head has width / heads features, unless `head_size` says how many.
        causal: a token sees what comes before it and itself; False: every token.
        scale: multiplies the scores. 1/sqrt(head_size) usually; under muP sqrt(base head_size)/head_size if heads grow in size.
        positions: rotary positions for queries and keys.
        attention_dropout: share of the attention weights dropped in training.
        dropout: share of the output dropped in training.
        implementation: `explicit` (matrix products and a softmax, which PopTorch can trace), `torch` (its
            scaled_dot_product_attention), or `fused` (the same, except on CPU, where blockwise.py is faster; never all scores at
            once). Change it at any time; equal numbers, except which weights a dropout drops.
        init_scale, query_zero_init: hidden matrices start with init_scale / sqrt(width), the query's at zero if asked for.
        mult: multiplies the output.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        scale: Optional[float] = None,
        positions: Optional[Rotary] = None,
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        implementation: str = "fused",
        bias: bool = True,
        init_scale: float = 1.0,
        query_zero_init: bool = False,
        mult: float = 1.0,
        head_size: Optional[int] = None,
        causal: bool = True,
    ) -> None:
        super().__init__()
        if heads < 1 or (head_size is None and width % heads):
            raise ConfigError(f"heads must divide the width, which is {width}", key="model.heads", value=heads)
        self.width, self.heads, self.head_size = width, heads, width // heads if head_size is None else head_size
        self.causal = causal
        self.scale = self.head_size**-0.5 if scale is None else float(scale)
        inner = self.heads * self.head_size
        self.query = FCLayer(width, inner, bias=bias, init_scale=init_scale, zero_init=query_zero_init)
        self.key = FCLayer(width, inner, bias=bias, init_scale=init_scale)
        self.value = FCLayer(width, inner, bias=bias, init_scale=init_scale)
        self.out = FCLayer(inner, width, dropout=dropout, bias=bias, init_scale=init_scale, mult=mult)
        self.positions, self.attention_dropout = positions, attention_dropout
        self.set_implementation(implementation)

    def set_implementation(self, implementation: str) -> None:
        """`explicit`, `fused` or `torch`."""
        if implementation not in IMPLEMENTATIONS:
            raise ConfigError(f"it is one of {', '.join(IMPLEMENTATIONS)}", key="model.attention", value=implementation)
        self.implementation = implementation

    def forward(
        self,
        x: torch.Tensor,
        mask: Optional[torch.Tensor] = None,
        cache: Optional[KVCache] = None,
        present: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """`[batch, seq, width] -> [batch, seq, width]`.

        Args:
            mask: on top of the causal one, broadcastable to `[batch, heads, seq, keys]`: bool (True = may be seen) or a float
                that is added to the scores. A row in which nothing may be seen gives finite, meaningless numbers.
            cache: keys and values of earlier tokens; `x` continues them.
            present: bool `[batch, seq]`, False where there is only padding, which no token sees.
        """
        if cache is not None and (present is not None or not self.causal):
            raise ConfigError(
                "a cache continues sequences of one length from left to right: causal attention, and no `present`",
                suggestion="group sequences by length, or compute them whole",
            )
        x = as_matmul_input(x)
        mask = seen(mask, present)
        if mask is None and cache is None and self._blockwise_applies(x):
            return self.out(self._blockwise(x))
        start = 0 if cache is None else cache.length
        q, k, v = self._split(self.query(x)), self._split(self.key(x)), self._split(self.value(x))
        if self.positions is not None:
            cos, sin = self.positions.rows(q, start)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.extend(k, v)
        return self.out(self._attend(q, k, v, mask).reshape(x.shape[0], x.shape[1], -1))

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Optional[torch.Tensor]) -> torch.Tensor:
        """Queries, keys, values `[batch, seq or keys, heads, head_size] -> [batch, seq, heads, head_size]`."""
        # torch's kernel on CPU has no batching rule: vmap would run it in a loop.
        written_out = self.implementation == "explicit" or (q.device.type == "cpu" and transformed(q))
        attend = self._explicit if written_out else self._by_torch
        return attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask).transpose(1, 2)

    def _blockwise_applies(self, x: torch.Tensor) -> bool:
        """Whether blockwise.py can do this call and gains by it.

        On CPU, without dropout, outside of torch.func transforms; and with projections that nobody watches or has replaced, since
        it multiplies by their three matrices at once instead of calling them.
        """
        dropping = self.training and self.attention_dropout > 0
        if self.implementation != "fused" or x.device.type != "cpu" or dropping or not self.causal:
            return False
        if not blockwise.worthwhile(x.shape[1], x.element_size()):
            return False
        bare = all(untouched(layer) for layer in (self.query, self.key, self.value))
        return bare and not transformed(x) and not transformed(self.query.linear.weight)

    def _blockwise(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, seq, width] -> [batch, seq, heads * head_size]`, before the output projection."""
        linears = [layer.linear for layer in (self.query, self.key, self.value)]
        bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
        packed = F.linear(x, torch.cat([linear.weight for linear in linears]), bias)
        packed = packed.view(x.shape[0], x.shape[1], 3, self.heads, self.head_size)
        turns = None if self.positions is None else self.positions.rows(packed, 0)
        return blockwise.blockwise_attention(packed, turns, self.scale).flatten(2)

    def divisible(self) -> bool:
        """Whether `of_heads` may stand for `forward`: nobody watches the projections or has replaced them."""
        bare = isinstance(self.out, FCLayer) and self.out.bare()
        return bare and all(untouched(layer) for layer in (self.query, self.key, self.value))

    def of_heads(
        self,
        x: torch.Tensor,
        first: int,
        last: int,
        mask: Optional[torch.Tensor] = None,
        keep: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """What heads first to last - 1 add to the output, `[batch, seq, width]`; the first group brings the output's bias.

        Args:
            mask: see `forward`. keep: a mask drawn before for the output's dropout, `[batch, seq, width]`.
        """
        part, heads = slice(first * self.head_size, last * self.head_size), last - first
        linears = [layer.linear for layer in (self.query, self.key, self.value)]
        weight = torch.cat([linear.weight[part] for linear in linears])
        bias = None if linears[0].bias is None else torch.cat([linear.bias[part] for linear in linears])
        packed = F.linear(x, weight, bias).view(x.shape[0], x.shape[1], 3, heads, self.head_size)
        turns = None if self.positions is None else self.positions.rows(packed, 0)
        if mask is None and self._blockwise_applies(x):
            mixed = blockwise.blockwise_attention(packed, turns, self.scale)
        else:
            q, k, v = packed.unbind(2)
            if turns is not None:
                q, k = rotate(q, *turns), rotate(k, *turns)
            mixed = self._attend(q, k, v, mask[..., first:last, :, :] if _by_head(mask) else mask)
        out = self.out.linear
        bias = out.bias if first == 0 else None
        if out.mult != 1.0:
            bias = None if bias is None else bias * out.mult
        weight = out.weight[:, part] if out.mult == 1.0 else out.weight[:, part] * out.mult
        found = F.linear(mixed.reshape(x.shape[0], x.shape[1], -1), weight, bias)
        return found if keep is None else dropped(found, keep, self.out.dropout)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, seq, heads * head_size] -> [batch, seq, heads, head_size]`."""
        return x.view(x.shape[0], x.shape[1], self.heads, self.head_size)

    def _explicit(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Optional[torch.Tensor]) -> torch.Tensor:
        """Queries, keys, values `[batch, heads, seq or keys, head_size] -> [batch, heads, seq, head_size]`."""
        scores = torch.matmul(q * self.scale, k.transpose(-1, -2))
        added = combined_mask(q, k, mask, self.causal)
        if added is not None:
            scores = scores + added
        weights = F.dropout(scores.softmax(-1), self.attention_dropout, self.training and self.attention_dropout > 0)
        return torch.matmul(weights, v)

    def _by_torch(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Optional[torch.Tensor]) -> torch.Tensor:
        """The same by one kernel. It scales by 1/sqrt(head_size) itself (torch 2.0 offers nothing else), so q brings the rest."""
        rest = self.scale * self.head_size**0.5
        if abs(rest - 1.0) > 1e-12:
            q = q * rest
        dropout = self.attention_dropout if self.training else 0.0
        causal = self.causal and mask is None and q.shape[2] == k.shape[2] and q.shape[2] > 1
        added = None if causal else combined_mask(q, k, mask, self.causal)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=added, dropout_p=dropout, is_causal=causal)


def untouched(layer: nn.Module) -> bool:
    """Whether calling `layer` is nothing but its matrix product."""
    return isinstance(layer, FCLayer) and layer.bare() and type(layer.linear) is Linear and layer.linear.mult == 1.0


def _by_head(mask: Optional[torch.Tensor]) -> bool:
    return mask is not None and mask.dim() >= 3 and mask.shape[-3] > 1


def seen(mask: Optional[torch.Tensor], present: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """`mask` and the keys that are `present` `[batch, keys]` as one mask, of the kind that `mask` is (bool if there is none)."""
    if present is None:
        return mask
    keys = present[:, None, None, :]
    if mask is None:
        return keys
    if mask.dtype == torch.bool:
        return torch.logical_and(mask, keys)
    return mask + (keys.to(mask.dtype) - 1.0) * -MASKED


def combined_mask(
    q: torch.Tensor, k: torch.Tensor, mask: Optional[torch.Tensor], causal: bool = True
) -> Optional[torch.Tensor]:
    """What is added to the scores: the causal mask `[seq, keys]` (the queries are the last keys) and `mask`; None if nothing.

    It is made here, from constants: PopTorch then evaluates it once on the host.
    """
    seq, keys = q.shape[2], k.shape[2]
    added = None
    if causal and seq > 1:
        added = torch.full((seq, keys), MASKED, dtype=q.dtype, device=q.device).triu(keys - seq + 1)
    if mask is None:
        return added
    if mask.dtype == torch.bool:
        mask = (mask.to(q.dtype) - 1.0) * -MASKED
    mask = mask.to(q.dtype)
    return mask if added is None else mask + added
