"""Sequence classifier: a text's tokens through the stack, pooled to one vector, to classes."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from ipu_lean.errors import ConfigError
from ipu_lean.models.gpt import GPT
from ipu_lean.models.heads import pool
from ipu_lean.models.spec import GPTSpec


class Classifier(GPT):
    """tokens -> embed -> stack of layers -> norm -> pool -> dense, tanh -> classes.

    A token of -1 is padding: it is found on the device, embedded as token 0, seen by no other token and counted by no mean. So
    shapes stay the same for texts of any length, and no token of the vocabulary is lost to padding.
    """

    def hidden(self, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Integers `[batch, seq]`, -1 for padding -> `[batch, hidden_width]`, pooled after the final norm."""
        tokens, present = self.arrived(tokens)
        return self.pooled(super().hidden(tokens, *args, present=present, **kwargs), present)

    def arrived(self, tokens: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """(tokens with 0 for padding, where there is none)."""
        present = tokens >= 0
        return torch.where(present, tokens, torch.zeros_like(tokens)), present

    def pooled(self, h: torch.Tensor, present: Optional[torch.Tensor]) -> torch.Tensor:
        """`[batch, seq, hidden_width] -> [batch, hidden_width]`."""
        assert present is not None
        return pool(h, present, self.spec.pooling)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Integers `[batch, seq]`, -1 for padding -> `[batch, classes]`."""
        return self.readout(self.hidden(tokens))

    def loss(self, h: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """(mean cross entropy, float32 sums `[3]` named by `sum_names`; a token is a text here).

        Args:
            h: `[batch, hidden_width]`, from `hidden`. labels: integers `[batch]`; -100 is not counted.
        """
        return super().loss(h, labels)

    def new_cache(self, batch: int, length: Optional[int] = None) -> Any:
        """ConfigError: a classifier continues nothing."""
        raise ConfigError("a classifier generates no text", key="model.head", value="classifier")


def make_gpt(spec: GPTSpec) -> GPT:
    """The model that a spec describes, by its head."""
    return Classifier(spec) if spec.head == "classifier" else GPT(spec)
