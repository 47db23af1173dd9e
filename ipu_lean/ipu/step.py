"""What PopTorch traces: the model's training step with its one marked loss, in operations that PopTorch has."""

from __future__ import annotations

from functools import partial
from typing import Any, Tuple

import torch
from torch import nn

from ipu_lean.config import Config
from ipu_lean.config.layout import is_half
from ipu_lean.models import TrainStep


class PopTrainStep(TrainStep):
    """(tokens, labels) int32 `[micro, seq]` -> (mean loss, float32 sums `[K]`), the loss marked.

    Only these few numbers leave the device: a returned activation would be a host stream of its own size. The loss is marked
    last, because the backward pass starts at the marked value, and returned, because what feeds no output is removed.

    Making one sets the model to what can be traced: written-out attention, plain operations in the loss, no recomputing in
    Python (PopART does that). None of it changes a number.
    """

    def __init__(self, model: nn.Module, poptorch: Any) -> None:
        super().__init__(model)
        # The function and not the module: a step can then be copied and pickled.
        self._mark = partial(poptorch.identity_loss, reduction="none")
        model.set_attention("explicit")
        model.set_loss(chunk=model.loss_chunk, plain=True)
        model.set_engine("store")

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Integers `[micro, seq]` twice."""
        loss, sums = super().forward(tokens, labels)
        return self._mark(loss.float()), sums


def to_precision(model: nn.Module, config: Config) -> nn.Module:
    """`model` in the type that the device computes in, parameters changed in place: fp16 for `fp16-ipu`, else as it was."""
    return model.half() if is_half(config) else model
