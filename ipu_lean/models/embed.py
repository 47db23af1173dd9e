"""Where tokens become vectors, and get their positions."""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.models.spec import GPTSpec
from ipu_lean.nn import AxialPositions, Embedding, LearnedPositions, SinusoidalPositions


class Embed(nn.Module):
    """Tokens `[batch, seq]` -> `[batch, seq, width]`: dropout(embedding_mult * (token + position)).

    Axial positions bring a dropout of their own, as published: embedding_mult * (dropout(token) + position).
    """

    def __init__(self, spec: GPTSpec) -> None:
        super().__init__()
        self.token = Embedding(spec.vocab, spec.width, spec.embedding_std)
        self.position: Optional[nn.Module] = None
        if spec.positions == "learned":
            self.position = LearnedPositions(spec.seq, spec.width, spec.embedding_std)
        elif spec.positions == "sinusoidal":
            self.position = SinusoidalPositions(spec.seq, spec.width, spec.embedding_std, spec.rotary_base)
        elif spec.positions == "axial":
            self.position = AxialPositions(spec.axial_shape, spec.axial_dims, spec.embedding_std, spec.embedding_dropout)
        self.mult, self.dropout, self.seq = spec.embedding_mult, spec.embedding_dropout, spec.seq

    def forward(self, tokens: torch.Tensor, start: int = 0) -> torch.Tensor:
        """`start` is the position of the first token. Raises ConfigError beyond the context length."""
        length = tokens.shape[1]
        if start + length > self.seq:
            raise ConfigError(
                f"{start + length} tokens were given, and the model was made for {self.seq}", key="model.seq", value=self.seq
            )
        h = self.token(tokens)
        if isinstance(self.position, AxialPositions):
            h = self._dropped(h) + self.position(h, start)
            return h if self.mult == 1.0 else h * self.mult
        if self.position is not None:
            h = h + self.position(h, start)
        if self.mult != 1.0:
            h = h * self.mult
        return self._dropped(h)

    def _dropped(self, h: torch.Tensor) -> torch.Tensor:
        return F.dropout(h, self.dropout, self.training) if self.dropout else h
