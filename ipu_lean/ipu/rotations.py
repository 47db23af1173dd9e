"""Random rotations of hashed attention on IPUs: variables of the device that the host writes anew between two calls.

A call cannot draw them itself: the second run of a recomputed layer must see the same ones, and an IPU's random numbers are not
the host's. Float buffers are variables on the device (JitDispatch.cpp:109), so rotations are buffers, and what makes them
rewritable without moving any weight is `Options.updatableNamedBuffers` with `copyNamedBuffersToDevice`. Three things about it:

- It hands the buffers over sorted by name, and PopART takes them in the order of the graph's inputs (PoplarExecutable.cpp:209).
  So the step holds its own, under numbered names.
- It fetches the whole optimizer state first (python/_poplar_executor.py:616), though buffers do not touch it; `send` prevents it.
- Reading a wrapped buffer on the host fetches all weights. So the host writes through tensors that were taken before wrapping.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ipu_lean.config import Config, layer_kinds
from ipu_lean.nn.attention.hashing import Rotations

_BUFFER = "rotations"


def sources(model: nn.Module) -> Tuple[Rotations, ...]:
    """The modules that hold a layer's rotations, each once."""
    return tuple(module for module in model.modules() if isinstance(module, Rotations))


def name_of(number: int) -> str:
    """Of the step's buffer for the layer of that number: the alphabet sorts them as they are counted."""
    return f"{_BUFFER}{number:04d}"


@contextmanager
def given(step: nn.Module, held: Sequence[Rotations]) -> Iterator[None]:
    """Inside, each of `held` reads the step's buffer for it; afterwards its own again, since a trace may not leave others."""
    own = [module._buffers[_BUFFER] for module in held]
    for number, module in enumerate(held):
        module._buffers[_BUFFER] = step._buffers[name_of(number)]
    try:
        yield
    finally:
        for module, buffer in zip(held, own):
            module._buffers[_BUFFER] = buffer


class Redraw:
    """Keeps the rotations of a step, on the host and on the device, at those of the next update.

    Args:
        step: not wrapped yet; it is made to hold buffers of its own if the configuration redraws rotations at all.
    """

    def __init__(self, step: Any, config: Config) -> None:
        self._config = config
        self.names: List[str] = step.hold_rotations() if needed(config) else []
        self._sources = sources(step.model) if self.names else ()
        self._written = [step._buffers[name].detach() for name in self.names]
        self._now = 0  # what a model is built with

    def due(self, update: int) -> Optional[int]:
        """The draw that `update` (from 0) hashes with, if another one stands."""
        if not self.names:
            return None
        draw = layer_kinds.draw_of(self._config.model, update, self._config.batch.device_iterations)
        return None if draw == self._now else draw

    def write(self, draw: int) -> None:
        """Another draw, on the host."""
        self._now = draw
        for module, buffer in zip(self._sources, self._written):
            buffer.copy_(module.drawn(draw))

    def send(self, executor: Any, optimizer: Any) -> None:
        """From the host to the device that `executor` is attached to, and nothing else."""
        # PopTorch fetches the optimizer's state if this says that the host's is out of date.
        dirty = getattr(optimizer, "host_state_is_dirty", False)
        if dirty:
            optimizer.host_state_is_dirty = False
        try:
            executor.copyNamedBuffersToDevice()
        finally:
            if dirty:
                optimizer.host_state_is_dirty = True

    def release(self) -> None:
        """Leave the model, once unwrapped, with the rotations that stood last."""
        for module in self._sources:
            module.redraw(self._now)


def needed(config: Config) -> bool:
    """Whether the step hashes with rotations that change."""
    return config.model.kind == "gpt" and layer_kinds.redraws(config.model)


def fresh(held: Sequence[Rotations]) -> List[Tuple[str, torch.Tensor]]:
    """Names and contents of the buffers that a step registers for them."""
    return [(name_of(number), module.rotations.detach().clone()) for number, module in enumerate(held)]
