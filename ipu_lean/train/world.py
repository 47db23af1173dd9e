"""The processes that train together: who am I, and the few things we tell each other.

A world of one needs no process group, and every method is then a plain local operation.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Callable, List, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.distributed as dist

from ipu_lean.config import Config
from ipu_lean.errors import ConfigError, RunError

Batch = Tuple[np.ndarray, np.ndarray]


@dataclass
class World:
    """`rank` of `size` processes, `local_rank` on this host, computing on `device`."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def current(cls, config: Config) -> World:
        """The world of this process: the default process group if there is one, else a world of one."""
        grouped = dist.is_available() and dist.is_initialized()
        rank, size = (dist.get_rank(), dist.get_world_size()) if grouped else (0, 1)
        local_rank = int(os.environ.get("LOCAL_RANK", "0")) if grouped else 0
        device = torch.device("cuda", local_rank) if config.device == "gpu" else torch.device("cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return cls(rank, size, local_rank, device)

    @property
    def first(self) -> bool:
        """Whether this process writes files and speaks."""
        return self.rank == 0

    def check_replicas(self, replicas: int) -> None:
        """ConfigError unless the processes can share the replicas evenly."""
        if replicas % self.size:
            raise ConfigError(
                f"{self.size} processes share them evenly, so their number must divide this",
                key="batch.replicas",
                value=replicas,
                suggestion=f"set `batch.replicas: {self.size * max(1, round(replicas / self.size))}`",
            )

    def rows(self, batch: Batch, config: Config) -> Batch:
        """This process's rows of a global batch `[accumulation * replicas * micro, seq]` (replicas `rank*R/W ..
        (rank+1)*R/W`), in order.
        """
        if self.size == 1:
            return batch
        micro, replicas = config.batch.micro, config.batch.replicas
        share = replicas // self.size
        parts = []
        for array in batch:
            split = array.reshape((config.batch.accumulation, replicas, micro) + array.shape[1:])
            mine = split[:, self.rank * share : (self.rank + 1) * share]
            parts.append(np.ascontiguousarray(mine.reshape((-1,) + array.shape[1:])))
        return parts[0], parts[1]

    # -- collectives -----------------------------------------------------------------------------------------------------
    def sum(self, values: Sequence[float]) -> List[float]:
        """Element-wise sum over processes, in float64."""
        if self.size == 1:
            return [float(value) for value in values]
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def any(self, flag: bool) -> bool:
        """Whether any process says yes."""
        return self.sum([1.0 if flag else 0.0])[0] > 0 if self.size > 1 else flag

    def broadcast(self, value: Any) -> Any:
        """The first process's `value` (any picklable object), on every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device if self.device.type == "cuda" else None)
        return box[0]

    def gather(self, value: Any) -> List[Any]:
        """Every process's `value`, by rank, on every process."""
        if self.size == 1:
            return [value]
        box: List[Any] = [None] * self.size
        dist.all_gather_object(box, value)
        return box

    def barrier(self) -> None:
        """Wait for the others."""
        if self.size > 1:
            dist.barrier()

    def on_first(self, action: Callable[[], None]) -> None:
        """Run `action` in the process that writes files. Every process makes the call."""
        if self.first:
            action()

    def agree(self, error: Optional[Exception]) -> None:
        """Raise on every process what the first one met, so that none is left waiting for it."""
        if self.size == 1:
            if error is not None:
                raise error
            return
        text = self.broadcast(None if error is None else str(error))
        if error is not None:
            raise error
        if text is not None:
            raise RunError(text)
