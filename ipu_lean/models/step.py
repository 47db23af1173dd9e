"""The step that every device runs: inputs and labels in, loss and sums out."""

from __future__ import annotations

from typing import Tuple

import torch
from torch import nn


class TrainStep(nn.Module):
    """(inputs, labels) -> (loss, sums), as one module: what an engine wraps, and what PopTorch traces.

    Any model will do that has `hidden(inputs)`, `loss(h, labels)` and `sum_names`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    @property
    def sum_names(self) -> Tuple[str, ...]:
        """Names of the sums, in order."""
        return tuple(self.model.sum_names)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels `[batch, seq]`, or images `[batch, features]` and labels `[batch]` -> (mean loss, a scalar; float32
        sums `[3]`, which carry no gradient).
        """
        return self.model.loss(self.model.hidden(inputs), labels)
