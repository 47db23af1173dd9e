"""What a Reformer has beside a GPT (Kitaev et al. 2020): layers of hashed or local attention, lengths that suit them, rotations.

The model itself is a `GPT` whose layers say what kind of attention they have (`GPTSpec.kinds`).
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, Optional, Tuple

import torch
from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.models.spec import GPTSpec
from ipu_lean.nn import CausalSelfAttention, Rotary
from ipu_lean.nn.attention.local import LocalSelfAttention
from ipu_lean.nn.attention.lsh import LSHSelfAttention
from ipu_lean.reversible import remember


def make_attention(spec: GPTSpec, positions: Optional[Rotary], place: int, mult: float) -> nn.Module:
    """The attention of the layer `place` (counted over those with weights of their own); `mult` multiplies its output."""
    kind = spec.kinds[place] if spec.kinds else "full"
    common: Dict[str, Any] = {
        "head_size": spec.head_size,
        "causal": spec.causal,
        "positions": positions,
        "attention_dropout": spec.attention_dropout,
        "dropout": spec.dropout,
        "implementation": spec.attention,
        "bias": spec.bias if spec.attention_bias is None else spec.attention_bias,
        "init_scale": spec.init_scale,
        "mult": mult,
    }
    if kind == "lsh":
        lsh = spec.lsh
        return LSHSelfAttention(
            spec.stack_width,
            spec.heads,
            chunk=lsh.chunk,
            before=lsh.before,
            after=lsh.after,
            hashes=lsh.hashes,
            buckets=lsh.buckets,
            full_below=lsh.full_below,
            seq=spec.padded_length(spec.seq),
            score_mult=lsh.score_mult,
            seed=spec.seed,
            layer=place,
            remember=remember,
            **common,
        )
    common.update(scale=spec.attention_scale, query_zero_init=spec.query_zero_init)
    if kind == "local":
        local = spec.local
        return LocalSelfAttention(
            spec.stack_width, spec.heads, chunk=local.chunk, before=local.before, after=local.after, **common
        )
    return CausalSelfAttention(spec.stack_width, spec.heads, **common)


def pad(
    h: torch.Tensor, present: Optional[torch.Tensor], length: int
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """`h` `[batch, seq, width]` with zeros up to `length` tokens, and which of them are there, bool `[batch, length]`."""
    batch, seq, width = h.shape
    if length == seq:
        return h, present
    if present is None:
        present = torch.ones((batch, seq), dtype=torch.bool, device=h.device)
    absent = torch.zeros((batch, length - seq), dtype=torch.bool, device=h.device)
    return torch.cat([h, h.new_zeros(batch, length - seq, width)], 1), torch.cat([present, absent], 1)


def check_present(present: Optional[torch.Tensor], h: torch.Tensor) -> None:
    """ConfigError unless `present` is a mask of the tokens of `h`."""
    if present is not None and (present.dtype != torch.bool or present.shape != h.shape[:2]):
        raise ConfigError(
            f"which tokens are present is a bool for each, of shape {list(h.shape[:2])}",
            value=f"{present.dtype} of shape {list(present.shape)}",
            suggestion="True where a token stands, False where there is padding",
        )


def hashing(model: nn.Module) -> Iterator[LSHSelfAttention]:
    """The hashed attentions of a model, each once."""
    return (module for module in model.modules() if isinstance(module, LSHSelfAttention))
