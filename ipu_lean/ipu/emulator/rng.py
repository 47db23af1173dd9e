"""The device's random numbers: a state of their own, so that a run neither reads nor moves torch's generator on the host."""
from __future__ import annotations

import os
from typing import Any, List, Optional

import torch


class DeviceRandom:
    """Used as a context around a run. The numbers never equal the host's for the same seed (as on an IPU)."""

    def __init__(self, seed: Optional[int]) -> None:
        self.seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
        generator = torch.Generator()
        generator.manual_seed((self.seed + 0x1F0) & 0x7FFFFFFFFFFFFFFF)
        self._state = generator.get_state()
        self._outer: Optional[torch.Tensor] = None

    def __enter__(self) -> DeviceRandom:
        self._outer = torch.get_rng_state()
        torch.set_rng_state(self._state)
        return self

    def __exit__(self, *error: Any) -> None:
        self._state = torch.get_rng_state()
        torch.set_rng_state(self._outer)

    def state(self) -> List[int]:
        return [self.seed, *self._state.tolist()]

    def set_state(self, state: List[int]) -> None:
        self.seed = int(state[0])
        if len(state) > 1:
            self._state = torch.tensor(state[1:], dtype=torch.uint8)
