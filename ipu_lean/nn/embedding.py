"""Embeddings: tables of vectors whose size at initialisation does not depend on the width (muP's input role)."""

from __future__ import annotations

from typing import Dict

import torch
from torch import nn


class Embedding(nn.Embedding):
    """Integers `[batch, seq]` below `vocab` -> `[batch, seq, width]`; entries start as normal(0, std) at every width."""

    def __init__(self, vocab: int, width: int, std: float = 0.1) -> None:
        self.std = std
        super().__init__(vocab, width)

    @property
    def init_stds(self) -> Dict[str, float]:
        """Standard deviation of each parameter at initialisation, by name."""
        return {"weight": self.std}

    def reset_parameters(self) -> None:
        """Draw the table anew."""
        with torch.no_grad():
            self.weight.normal_(0.0, self.std)
