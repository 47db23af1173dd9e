"""Weights changed on the host while a device holds its own: PopTorch would overwrite them at its next copy, silently."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import torch
from torch import nn

from ipu_lean.errors import RunError

Marks = Dict[str, Tuple[str, str]]  # as text, in which nan equals nan


class HostGuard:
    """Tells before a call whether the host's copies are what the device last sent.

    Costs nothing while nobody reads weights between two calls: PopTorch marks the host's copies as out of date after a call, and
    whoever reads one (an edit reads first) has them copied. Only then are they compared.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: Optional[Marks] = None

    def note(self) -> None:
        """The host's copies were just fetched."""
        self._known = self._marks()

    def check(self, executor: Any) -> None:
        """Call before the executor runs. RunError if a weight differs from the device's; the host's copies are then restored."""
        # The name of the flag is PopTorch's own (python/_poplar_executor.py); without it there is nothing to go by.
        if not executor.isAttachedToDevice() or getattr(executor, "_dirty_host_weights", True):
            self._known = None
            return
        mine = self._marks()
        if mine == self._known:
            self._known = None
            return
        executor.copyWeightsToHost()
        device, self._known = self._marks(), None
        changed = [name for name in mine if mine[name] != device[name]]
        if changed:
            name = changed[0]
            more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
            raise RunError(
                f"`{name}`{more} was changed on the host after the device took its weights, and the next copy would undo it: its "
                f"sum is {float.fromhex(mine[name][0]):.6g} here and {float.fromhex(device[name][0]):.6g} there. Change weights "
                "before the first step, or between detach() and attach(), which sends them."
            )

    def _marks(self) -> Marks:
        with torch.no_grad():
            wide = {name: parameter.detach().double() for name, parameter in self._model.named_parameters()}
            return {name: (value.sum().item().hex(), value.square().sum().item().hex()) for name, value in wide.items()}
