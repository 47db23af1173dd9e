"""Sinusoidal positions (Vaswani et al. 2017), scaled to the size of the embedding that they are added to."""

from __future__ import annotations

from typing import Dict

import torch

from ipu_lean.errors import ConfigError
from ipu_lean.nn.positions.table import PositionTable


class SinusoidalPositions(PositionTable):
    """Vectors `[length, width]`: sines of p * base**(-2i / width) in the first half, cosines in the second.

    Vaswani et al. multiply the embedding by sqrt(width), which would grow with width; here the sinusoids are multiplied so that
    their root mean square is `rms`, the embedding's standard deviation, at every width.
    """

    table: torch.Tensor

    def __init__(self, seq: int, width: int, rms: float = 0.1, base: float = 10000.0) -> None:
        if width % 2:
            raise ConfigError("sinusoidal positions need an even width", key="model.width", value=width)
        super().__init__(seq)
        self.width, self.rms, self.base = width, rms, base
        self._register()

    def tables(self) -> Dict[str, torch.Tensor]:
        """`[seq, width]`; sin^2 + cos^2 = 1 makes the mean square of each row one half before scaling."""
        half = self.width // 2
        rates = self.base ** (-torch.arange(half, dtype=torch.float64, device="cpu") / half)
        angle = torch.arange(self.seq, dtype=torch.float64, device="cpu")[:, None] * rates
        return {"table": torch.cat([angle.sin(), angle.cos()], -1) * (self.rms * 2**0.5)}

    def forward(self, like: torch.Tensor, start: int = 0) -> torch.Tensor:
        """`[length, width]` for `like` of shape `[batch, length, width]`."""
        self._ready(like.device)
        length = like.shape[1]
        if start + length > self.seq:
            raise ConfigError(
                f"position {start + length - 1} lies beyond the context of {self.seq} tokens", key="model.seq", value=self.seq
            )
        return self.table[start : start + length]
