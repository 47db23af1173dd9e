"""Learned positions: one vector a position, added to the embedded tokens (GPT-2)."""

from __future__ import annotations

import torch

from ipu_lean.errors import ConfigError
from ipu_lean.nn.embedding import Embedding


class LearnedPositions(Embedding):
    """Vectors `[length, width]` for the positions start .. start + length - 1. For muP it is an embedding like any other."""

    def __init__(self, seq: int, width: int, std: float = 0.1) -> None:
        super().__init__(seq, width, std)

    def forward(self, like: torch.Tensor, start: int = 0) -> torch.Tensor:  # type: ignore[override]
        """`[length, width]` for `like` of shape `[batch, length, width]`."""
        length = like.shape[1]
        if start + length > self.num_embeddings:
            raise ConfigError(
                f"position {start + length - 1} lies beyond the context of {self.num_embeddings} tokens",
                key="model.seq",
                value=self.num_embeddings,
            )
        return self.weight if length == self.num_embeddings else self.weight[start : start + length]
