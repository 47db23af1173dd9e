"""What a call returns: which micro-batches' outputs, and how they are put together (Compiler.cpp:1305-1337)."""
from __future__ import annotations

from typing import Any, List, Sequence

import torch

from . import enums


class Outputs:
    """Collects the outputs of a call, micro-batch by micro-batch.

    Rows returned with T = replicas x iterations x accumulation: All micro*T, EveryN(N) micro*T/N, Final and Sum micro*replicas.
    A scalar becomes a vector of that many entries when there are more than one. Constants are never batched.
    """

    def __init__(self, mode: int, period: int, replicas: int, steps: int, constant: Sequence[bool]) -> None:
        self.mode, self.period, self.replicas, self.steps = mode, period, replicas, steps
        self.constant = constant
        self._kept: List[List[List[torch.Tensor]]] = [[] for _ in range(replicas)]  # [replica][kept step][output]
        self._seen = [0] * replicas

    def add(self, outputs: Sequence[torch.Tensor], replica: int) -> None:
        """The outputs of the replica's next micro-batch."""
        step = self._seen[replica]
        self._seen[replica] += 1
        kept = self._kept[replica]
        if self.mode == enums.OutputMode.Final and step + 1 < self.steps:
            return
        if self.mode == enums.OutputMode.EveryN and (step + 1) % self.period:
            return
        values = [output.detach().clone() for output in outputs]
        if self.mode == enums.OutputMode.Sum and kept:
            kept[0] = [total + value for total, value in zip(kept[0], values)]
        else:
            kept.append(values)

    def result(self) -> List[torch.Tensor]:
        """One tensor for each output; 64-bit types as their 32-bit ones."""
        order = [values for step in zip(*self._kept) for values in step]  # steps outermost, then replicas
        made = []
        for index, constant in enumerate(self.constant):
            pieces = [values[index] for values in order]
            made.append(_narrow(pieces[0] if constant or len(pieces) == 1 else _join(pieces)))
        return made


def _join(pieces: List[torch.Tensor]) -> torch.Tensor:
    return torch.stack(pieces) if pieces[0].dim() == 0 else torch.cat(pieces)


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    types: Any = {torch.int64: torch.int32, torch.float64: torch.float32}
    return tensor.to(types.get(tensor.dtype, tensor.dtype))
