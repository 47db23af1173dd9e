"""Tensors of the graph that `Options.anchorTensor` brings to the host: gradients, updated and current weights.

Names as PopART gives them (docs/user_guide/debugging.py:35-36): `Gradient___<parameter>` for each micro-batch, loss scaling
included; `UpdatedVar___<parameter>` and a variable's own name for each update. Other tensors have no name in the emulator.
"""
from __future__ import annotations

from typing import Any, Dict, List, Sequence

import torch

from .errors import Error
from .options import Options
from .outputs import Outputs

GRADIENT, UPDATED = "Gradient___", "UpdatedVar___"


def names(trainable: Sequence[str], variables: Sequence[str]) -> List[str]:
    """Every name that can be anchored."""
    return [*variables, *(GRADIENT + name for name in trainable), *(UPDATED + name for name in trainable)]


class Anchors:
    """Collects what one call anchors.

    Args:
        options: whose `anchored_tensors` map a short name to [long name, mode follows the outputs', mode, period].
        iterations, accumulation, replicas: of the call; gradients come once a micro-batch, variables once an update.
    Raises: Error for a name that the graph does not have.
    """

    def __init__(self, options: Options, known: Sequence[str], iterations: int, accumulation: int, replicas: int) -> None:
        self._kept: Dict[str, Outputs] = {}
        self.short: Dict[str, str] = {}
        for short, (long, follows, mode, period) in options.anchored_tensors.items():
            if long not in known:
                raise Error(f"Anchored tensor {long!r} ({short}) is not in the graph; see getTensorNames()")
            if follows:
                mode, period = options.output_mode, options.output_return_period
            each = long.startswith(GRADIENT)
            self.short[short] = long
            self._kept[long] = Outputs(mode, period, replicas if each else 1, iterations * (accumulation if each else 1), [False])

    @property
    def gradients(self) -> bool:
        return any(name.startswith(GRADIENT) for name in self._kept)

    def micro_batch(self, gradients: Dict[str, torch.Tensor], parameters: Dict[str, torch.Tensor], replica: int) -> None:
        for name, kept in self._kept.items():
            if name.startswith(GRADIENT):
                parameter = name[len(GRADIENT):]
                kept.add([gradients.get(parameter, torch.zeros_like(parameters[parameter]))], replica)

    def updated(self, variables: Dict[str, torch.Tensor]) -> None:
        for name, kept in self._kept.items():
            if not name.startswith(GRADIENT):
                kept.add([variables[name[len(UPDATED):] if name.startswith(UPDATED) else name]], 0)

    def result(self) -> Dict[str, Any]:
        """By short name."""
        return {short: self._kept[long].result()[0] for short, long in self.short.items()}
