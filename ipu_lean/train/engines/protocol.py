"""What every device offers to the rest of the room: one update, one evaluation batch, its state. Nothing above knows which one
it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Optional, Protocol, Tuple

import numpy as np
import torch

Batch = Tuple[np.ndarray, np.ndarray]
"""(tokens, labels), each int32 `[rows, seq]`."""


@dataclass(frozen=True)
class StepResult:
    """One weight update, over all micro-batches and processes.

    `loss`: mean over micro-batches of micro-batch means (nats a token). `sums`: the model's metric sums over the global batch,
    in the order of its `sum_names`. `lr`: the rate at which the update was made (of a group without multiplier). `tokens`:
    labels seen by all processes.
    `grad_norm`: global gradient norm before clipping, None where the device keeps it to itself. `skipped`: the loss scale
    overflowed, so weights stayed as they were.
    """

    loss: float
    sums: Tuple[float, ...]
    lr: float
    tokens: int
    grad_norm: Optional[float] = None
    skipped: bool = False


class Engine(Protocol):
    """A device that trains. Calls are collective: with several processes, each makes them in the same order."""

    updates_per_call: int
    update: int

    def train_step(self, batch: Batch) -> StepResult:
        """One call of the device with this process's rows of the global batch. RunError for a loss or gradient that is
        not finite.
        """

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
