"""What every device offers to the rest of the room: one call (an update, or several on an IPU), one evaluation batch, its state.
Nothing above knows which one it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Optional, Protocol, Tuple

import numpy as np
import torch

from ipu_lean.errors import RunError

Batch = Tuple[np.ndarray, np.ndarray]
"""(tokens, labels), each int32 `[rows, seq]`; or (images, classes), float32 `[rows, features]` and int32 `[rows]`."""


class DeviceFailure(RunError):
    """The device failed in a way from which a new attempt may recover, with the last checkpoint as its start."""


@dataclass(frozen=True)
class StepResult:
    """One call of the engine (`updates_per_call` weight updates), over all micro-batches and processes.

    `loss`: mean over micro-batches of micro-batch means (nats a token), of the call's last update; `losses`: of each, where there
    are several. `sums`: the model's metric sums over all rows of the call, in the order of its `sum_names`. `lr`: the rate at
    which the updates were made (of a group without multiplier). `tokens`: labels seen by all processes.
    `grad_norm`: global gradient norm before clipping, None where the device keeps it to itself. `skipped`: the loss scale
    overflowed, so weights stayed as they were.
    """

    loss: float
    sums: Tuple[float, ...]
    lr: float
    tokens: int
    grad_norm: Optional[float] = None
    skipped: bool = False
    losses: Tuple[float, ...] = ()


class Engine(Protocol):
    """A device that trains. Calls are collective: with several processes, each makes them in the same order.

    `updates_per_call`: weight updates in a `train_step`. `eval_micro_batches`: micro-batches in an `eval_step`. `update`: made so
    far. `holds_weights`: the device has weights of its own, so the model in host memory is not up to date (nor plain).
    """

    updates_per_call: int
    eval_micro_batches: int
    update: int
    holds_weights: bool

    def train_step(self, batch: Batch) -> StepResult:
        """One call of the device with this process's rows of the global batches, one batch for each update. RunError for a loss
        or gradient that is not finite; DeviceFailure if trying again may help.
        """

    def describe(self) -> Dict[str, str]:
        """Texts worth keeping in the run directory, by file name."""

    def eval_step(self, batch: Batch) -> np.ndarray:
        """Metric sums (float64 `[K]`) of this process's rows, without training noise and without touching weights or RNG."""

    def sync_to_host(self) -> Dict[str, torch.Tensor]:
        """Full weights by name, on the host (empty on every process but the first)."""

    def optimizer_state(self) -> Dict[str, Any]:
        """`{"state": {parameter name: {key: tensor}}, "groups": [...]}` in full size, on the host (empty but on the
        first process).
        """

    def load_optimizer_state(self, state: Dict[str, Any]) -> None:
        """Take over what `optimizer_state` returned, in a world of any size."""

    def state_dict(self) -> Dict[str, Any]:
        """Plain JSON: number of updates made, loss scale."""

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""

    def attach(self) -> None:
        """Take the device (again)."""

    def detach(self) -> None:
        """Let another engine use the device."""

    def close(self) -> None:
        """Give everything back; the engine is not used afterwards."""
