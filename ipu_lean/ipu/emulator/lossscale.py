"""Automatic loss scaling (popart transforms/automaticlossscaling.cpp, popx/op/lossscaleupdatex.cpp).

After each update (or every `updatePeriod`-th): where more than a share of the elements of the watched gradients lies at or above
an edge, the scale is halved, else doubled. Watched are the float16 gradients that matrix products and convolutions hand on. The
edge is a share of 65535, as far as float16 reaches. The scale stays at most 2^15.
"""
from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, List, Optional

import torch

_PREFIX = "automaticLossScalingSettings."
_LARGEST = 65535.0
_LIMIT = 2.0 ** 15
STATE = "lossScaleUpdateFactor"
"""PopART's name for what the optimizer's loss scaling is multiplied by."""


class AutomaticLossScale:
    """The factor on the optimizer's loss scaling, and the counts since it was last changed.

    Args:
        settings: PopART's session options by name. narrow: some weights are float16, which bounds the scale.
    """

    def __init__(self, settings: Dict[str, Any], narrow: bool) -> None:
        self.edge = float(settings.get(_PREFIX + "binEdgeLocation", 0.0625)) * _LARGEST
        self.threshold = float(settings.get(_PREFIX + "thresholdUpperCountProportion", 1e-7))
        self.period = int(settings.get(_PREFIX + "updatePeriod", 1))
        self.narrow = narrow
        self.factor = 1.0
        self.updates = self.upper = self.total = 0

    @staticmethod
    def enabled(settings: Dict[str, Any]) -> bool:
        """Whether Options.Training.setAutomaticLossScaling(True) was called."""
        return bool(settings.get(_PREFIX + "enabled", False))

    def count(self, gradient: torch.Tensor) -> None:
        """Take a watched gradient into account; infinities and NaN lie above every edge."""
        if self.updates % self.period == 0:
            self.upper += gradient.numel() - int((gradient.abs() < self.edge).sum())
            self.total += gradient.numel()

    def update(self, base: float) -> None:
        """After a weight update; `base` is the optimizer's loss scaling, without the factor."""
        if self.updates % self.period == 0:
            self.factor *= 0.5 if self.upper > self.threshold * self.total else 2.0
            if self.narrow:
                self.factor = min(self.factor, _LIMIT / base)
        self.updates += 1
        self.upper = self.total = 0


_watching: List[Optional[AutomaticLossScale]] = [None]


@contextlib.contextmanager
def watching(scale: Optional[AutomaticLossScale]) -> Iterator[None]:
    """Gradients that products hand on inside the block are counted by `scale` (None: by nobody)."""
    _watching.append(scale)
    try:
        yield
    finally:
        _watching.pop()


def watch(gradient: torch.Tensor) -> None:
    """Called with each float16 gradient that a matrix product or convolution hands on."""
    if _watching[-1] is not None:
        _watching[-1].count(gradient)
