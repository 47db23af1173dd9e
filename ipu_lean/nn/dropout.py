"""Dropout whose mask is drawn before its input exists, for computations that are done in pieces."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def drawn_mask(like: torch.Tensor, dropout: float) -> torch.Tensor:
    """bool, in the shape of `like`: True where `F.dropout` of a tensor of this shape, type and device would keep, with the same
    random numbers."""
    with torch.no_grad():
        return F.dropout(torch.ones_like(like, memory_format=torch.contiguous_format), dropout) != 0


def dropped(x: torch.Tensor, keep: torch.Tensor, dropout: float) -> torch.Tensor:
    """`x` where `keep` says so, scaled up for what is lost; the backward pass needs the mask only."""
    return (x * keep) * (1.0 / (1.0 - dropout))
