"""Rotary positions (Su et al. 2021), in the rotate-half layout of GPT-NeoX: feature i of a head is paired with i + half."""

from __future__ import annotations

from typing import Any, Dict, Tuple

import torch

from ipu_lean.errors import ConfigError
from ipu_lean.nn.positions.table import PositionTable

_HALF = (torch.bfloat16, torch.float16)


class Rotary(PositionTable):
    """Turns each pair of features (i, i + head_size/2) at position p by the angle p * base**(-2i / head_size).

    Args:
        seq: longest position + 1.
        head_size: even.
        base: sets the longest wavelength, 2 pi base.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, seq: int, head_size: int, base: float = 10000.0) -> None:
        if head_size % 2:
            raise ConfigError("rotary positions turn features in pairs, so this is even", key="model.head_size", value=head_size)
        super().__init__(seq)
        self.head_size, self.base = head_size, base
        self._register()

    def tables(self) -> Dict[str, torch.Tensor]:
        """cos of each feature's angle, and sin with the sign that its partner enters with: both `[seq, 1, head_size]`."""
        half = self.head_size // 2
        rates = self.base ** (-torch.arange(half, dtype=torch.float64, device="cpu") / half)
        angle = torch.arange(self.seq, dtype=torch.float64, device="cpu")[:, None] * rates
        cos, sin = angle.cos(), angle.sin()
        return {"cos": torch.cat([cos, cos], -1)[:, None], "sin": torch.cat([-sin, sin], -1)[:, None]}

    def rows(self, like: torch.Tensor, start: int) -> Tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each `[length, 1, head_size]`, for `like` `[batch, length, heads, head_size]` that begins at `start`."""
        self._ready(like.device)
        stop = start + like.shape[1]
        if stop > self.seq:
            raise ConfigError(f"position {stop - 1} is beyond the context of {self.seq} tokens", key="model.seq", value=self.seq)
        dtype = self.cos.dtype if like.dtype in _HALF else like.dtype
        return self.cos[start:stop].to(dtype), self.sin[start:stop].to(dtype)

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Rotary:
        """A model in bf16 keeps its tables in fp32: 8 bits cannot tell the angles of distant positions apart."""
        super()._apply(fn, *args, **kwargs)
        if self.cos.dtype == torch.bfloat16:
            self.cos, self.sin = self.cos.float(), self.sin.float()
            if not self.cos.is_meta:
                tables = self.tables()
                self.cos.copy_(tables["cos"])
                self.sin.copy_(tables["sin"])
        return self

    def forward(self, x: torch.Tensor, start: int = 0) -> torch.Tensor:
        """`[batch, length, heads, head_size]`, turned; the first of its positions is `start`."""
        cos, sin = self.rows(x, start)
        return rotate(x, cos, sin)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x * cos + swap(x) * sin, where swap exchanges the halves of the last dimension and `sin` carries the sign; computed in the
    type of the tables, which are wider than a 16-bit `x` (except in a model that is fp16 throughout, as on an IPU).
    """
    if x.dtype in _HALF and cos.dtype != x.dtype:
        return rotate(x.to(cos.dtype), cos, sin).to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat([second, first], -1), sin)
