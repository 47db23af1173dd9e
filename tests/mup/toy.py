"""A small model with every kind of tensor, independent of the package's own models: embedding, FFN of ratio 2, norm, readout."""
from __future__ import annotations

from typing import Optional

import torch
from torch import nn


class Readout(nn.Linear):
    """The least that roles ask of a readout: its own multiplier as a number."""

    def __init__(self, width: int, out: int, base_width: int) -> None:
        self.width_mult, self.output_mult = width / base_width, 1.0
        self.init_stds = {"weight": 0.0, "bias": 0.0}
        super().__init__(width, out)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.output_mult * x / self.width_mult)


class Block(nn.Module):
    """A residual branch."""

    def __init__(self, width: int, ffn: int, branch: float) -> None:
        super().__init__()
        self.norm, self.branch = nn.LayerNorm(width), branch
        self.up, self.down = nn.Linear(width, ffn), nn.Linear(ffn, width)
        self.init_stds = {"up.weight": (3 * width) ** -0.5}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.branch * self.down(torch.relu(self.up(self.norm(x))))


class Toy(nn.Module):
    """Integers [batch] below 10 -> logits [batch, 5]."""

    def __init__(self, width: int, base_width: int = 16, depth: int = 2, ffn: Optional[int] = None, branch: float = 1.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.position = nn.Parameter(torch.zeros(3, width))
        self.features = nn.Linear(4, width)
        self.blocks = nn.ModuleList([Block(width, 2 * width if ffn is None else ffn, branch) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = Readout(width, 5, base_width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens) + self.position[0] + self.features(torch.ones(4, dtype=self.position.dtype))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))
