"""The two branches of a layer, and how layers become the blocks of a stack."""

from __future__ import annotations

from functools import partial
from typing import Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.models.parts import Parts
from ipu_lean.models.reformer import make_attention
from ipu_lean.models.spec import GPTSpec
from ipu_lean.nn import CausalSelfAttention, FCLayer, FeedForward, KVCache, Rotary, make_norm
from ipu_lean.nn.attention.full import seen
from ipu_lean.nn.dropout import drawn_mask
from ipu_lean.nn.precision import as_matmul_input
from ipu_lean.reversible import Pieces, ResidualBlock, ReversibleBlock, divided, make_coupling


class Branch(nn.Module):
    """x -> branch_mult * norm_after(f(norm_before(x))): what is added to the residual stream. norm_after only with `sandwich`.

    For the affine coupling the result is twice as wide: branch_mult * scale(norm_before(x)), a linear map that starts at zero,
    and then the above.
    """

    def __init__(self, spec: GPTSpec) -> None:
        super().__init__()
        width = spec.stack_width
        self.norm = make_norm(spec.norm, width, spec.norm_eps)
        self.norm_after = make_norm(spec.norm, width, spec.norm_eps) if spec.sandwich else None
        self.scale: Optional[nn.Module] = None
        if spec.stack == "reversible" and spec.coupling == "affine":
            self.scale = FCLayer(
                width, width, bias=spec.bias, init_scale=spec.init_scale, zero_init=True, mult=spec.branch_mult
            )
        # After a norm the multiplier is the branch's; without one, the last linear layer takes it.
        self.mult, self.inner_mult = (spec.branch_mult, 1.0) if spec.sandwich else (1.0, spec.branch_mult)

    def _finish(self, x: torch.Tensor, read: Optional[torch.Tensor]) -> torch.Tensor:
        if self.norm_after is not None:
            x = self.norm_after(x)
        x = x if self.mult == 1.0 else x * self.mult
        return x if self.scale is None else torch.cat((self.scale(read), x), -1)


class AttentionBranch(Branch):
    """`[batch, seq, width] -> [batch, seq, width]`."""

    def __init__(self, spec: GPTSpec, positions: Optional[Rotary], place: int = 0) -> None:
        super().__init__(spec)
        self.attention = make_attention(spec, positions, place, self.inner_mult)
        self.full = isinstance(self.attention, CausalSelfAttention)
        self.heads_at_once = spec.heads_at_once if self.full else 0

    def forward(
        self,
        x: torch.Tensor,
        mask: Optional[torch.Tensor] = None,
        cache: Optional[KVCache] = None,
        present: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """See `CausalSelfAttention` for mask, cache and present. With a cache all heads are computed at once."""
        heads = self.attention.heads
        if cache is None and 0 < self.heads_at_once < x.shape[0] * heads and self.attention.divisible():
            mask = seen(mask, present)
            parts = Parts(x.shape[0], heads, self.heads_at_once)
            pieces = Pieces(partial(self._begin, parts), partial(self._part, parts), parts.groups)
            return self._finish(divided(pieces, x, (self,), mask=mask), None if self.scale is None else self.norm(x))
        read = self.norm(x)
        if self.full:
            return self._finish(self.attention(read, mask, cache, present), read)
        if mask is not None:
            raise ConfigError(
                "a mask of queries by keys is for full attention; hashed and local attention never make that matrix",
                key="model.attention",
                suggestion="say with `present` which tokens are there",
            )
        return self._finish(self.attention(read, present=present, cache=cache), read)

    def _begin(self, parts: Parts, x: torch.Tensor) -> List[Tuple[torch.Tensor, ...]]:
        """What each part reads: its sequences, already normalised if other parts read them too, and the output's dropout mask."""
        given = [as_matmul_input(self.norm(x)) if parts.shared else x]
        dropout = self.attention.out.dropout
        if self.training and dropout:
            given.append(drawn_mask(as_matmul_input(x), dropout))
        split = list(zip(*(tensor.split(parts.rows) for tensor in given)))
        return [split[group] for group in parts.groups]

    def _part(
        self,
        parts: Parts,
        number: int,
        x: torch.Tensor,
        keep: Optional[torch.Tensor] = None,
        mask: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        if not parts.shared:
            x = as_matmul_input(self.norm(x))
        return self.attention.of_heads(x, *parts.heads_of(number), parts.mask_of(number, mask), keep)


class FeedForwardBranch(Branch):
    """`[batch, seq, width] -> [batch, seq, width]`."""

    def __init__(self, spec: GPTSpec) -> None:
        super().__init__(spec)
        self.feed_forward = FeedForward(
            spec.stack_width,
            spec.ffn_width,
            spec.activation,
            dropout=spec.dropout,
            bias=spec.bias,
            init_scale=spec.init_scale,
            mult=self.inner_mult,
        )
        self.chunk = spec.ffn_chunk

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x -> f(x)."""
        if 0 < self.chunk < x.numel() // x.shape[-1] and self.feed_forward.divisible():
            chunks = -(-(x.numel() // x.shape[-1]) // self.chunk)
            return divided(Pieces(self._begin, self._rows, range(chunks)), x, (self,))
        read = self.norm(x)
        return self._finish(self.feed_forward(read), read)

    def _begin(self, x: torch.Tensor) -> List[Tuple[torch.Tensor, ...]]:
        """Each chunk's tokens `[tokens, width]` and, if there is dropout, its part of the mask."""
        given = [x.reshape(-1, x.shape[-1])]
        dropout = self.feed_forward.down.dropout
        if self.training and dropout:
            given.append(drawn_mask(as_matmul_input(x), dropout).view_as(given[0]))
        return list(zip(*(tensor.split(self.chunk) for tensor in given)))

    def _rows(self, number: int, x: torch.Tensor, keep: Optional[torch.Tensor] = None) -> torch.Tensor:
        read = self.norm(x)
        return self._finish(self.feed_forward(read, keep), read)


Layer = Tuple[AttentionBranch, FeedForwardBranch]


def make_layers(spec: GPTSpec, positions: Optional[Rotary]) -> List[Layer]:
    """The layers in execution order; a shared layer is the same pair of modules again.

    Visit i of `visits` runs group i * groups // visits, and a group runs all its `num_inner_groups` layers (the layout of ALBERT
    and lean_transformer).
    """
    groups = spec.visits if spec.groups is None else spec.groups
    inner = spec.num_inner_groups
    made = [
        [(AttentionBranch(spec, positions, group * inner + place), FeedForwardBranch(spec)) for place in range(inner)]
        for group in range(groups)
    ]
    return [layer for visit in range(spec.visits) for layer in made[visit * groups // spec.visits]]


def make_blocks(spec: GPTSpec, layers: Sequence[Layer]) -> List[nn.Module]:
    """The stack's blocks in execution order: one layer each, or two with order `aaff`. Equal runs of layers share a block."""
    per_block = 2 if spec.order == "aaff" else 1
    if len(layers) % per_block:
        raise ConfigError("order aaff joins two layers in a block, so the depth is even", key="model.depth", value=spec.depth)
    if per_block == 2 and len({id(layer[0]) for layer in layers}) < len(layers) and spec.num_inner_groups % 2:
        raise ConfigError(
            "order aaff joins two layers in a block, so groups that are visited more than once hold an even number of layers",
            key="model.num_inner_groups",
            value=spec.num_inner_groups,
            suggestion="use 2, or order attn-ffn",
        )
    coupling = make_coupling(spec.coupling, spec.beta, spec.index, spec.exact_bits)
    made: Dict[Tuple[int, ...], nn.Module] = {}
    blocks = []
    for first in range(0, len(layers), per_block):
        group = layers[first : first + per_block]
        key = tuple(id(attention) for attention, _ in group)
        if key not in made:
            branches = [attention for attention, _ in group] + [feed_forward for _, feed_forward in group]
            made[key] = ResidualBlock(branches) if spec.stack == "residual" else ReversibleBlock(branches, coupling)
        blocks.append(made[key])
    return blocks
