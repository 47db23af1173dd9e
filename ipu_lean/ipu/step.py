"""What PopTorch traces: the model's training step with its one marked loss, in operations that PopTorch has."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, List, Optional, Tuple

import torch
from torch import nn

from ipu_lean.config import Config
from ipu_lean.config.layout import is_half
from ipu_lean.ipu import rotations
from ipu_lean.models import TrainStep
from ipu_lean.nn import LSHSelfAttention


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
        self._choose_orders(None)
        self._held: Tuple[Any, ...] = ()

    def _choose_orders(self, remember: Optional[Callable[..., Any]]) -> None:
        """Hashed attention counts its tokens in place of sorting them, and has the order kept by `remember`, if by any."""
        for module in self.model.modules():
            if isinstance(module, LSHSelfAttention):
                module.sorting, module.remember = "counting", remember

    def hold_rotations(self) -> List[str]:
        """Have copies of the model's random rotations as buffers of the step, by names that it returns; forward reads those."""
        self._held = rotations.sources(self.model)
        found = rotations.fresh(self._held)
        for name, tensor in found:
            self.register_buffer(name, tensor, persistent=False)
        return [name for name, _ in found]

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        """Integers `[micro, seq]` twice."""
        with rotations.given(self, self._held):
            return self._run(tokens, labels)

    def _run(self, tokens: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        loss, sums = super().forward(tokens, labels)
        return self._mark(loss.float()), sums


def to_precision(model: nn.Module, config: Config) -> nn.Module:
    """`model` in the type that the device computes in, parameters changed in place: fp16 for `fp16-ipu`, else as it was."""
    return model.half() if is_half(config) else model
