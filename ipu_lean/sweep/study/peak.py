"""The most bytes of activations alive in a forward and backward pass, as the process or the allocator held them."""

from __future__ import annotations

from typing import Any, Optional

import torch

from ipu_lean._compat import TORCH
from ipu_lean.train.alive import Alive
from ipu_lean.train.engines.protocol import Batch
from ipu_lean.train.engines.torch_engine import TorchEngine
from ipu_lean.train.precision import autocast


def peak_megabytes(engine: Any, batch: Batch) -> Optional[float]:
    """Peak of one micro-batch's forward and backward pass beside parameters and their gradients, in 1e6 bytes.

    Generators, gradients and weights are left as they were. None for engines other than torch's, compiled branches, and on CPU
    for torch before 2.1, whose storages cannot be followed.
    """
    if not isinstance(engine, TorchEngine) or engine.config.train.compile != "none":
        return None
    device = engine.world.device
    if device.type == "cpu" and TORCH < (2, 1):
        return None
    rows = tuple(torch.from_numpy(part[: engine.config.batch.micro]).to(device) for part in batch)
    parameters = [parameter for parameter in engine.wrapped.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    held = [*parameters, *(parameter.grad for parameter in parameters), *engine.wrapped.buffers(), *rows]
    engine.wrapped.train()

    def step() -> None:
        with autocast(engine.config.precision, device.type):
            loss, _ = engine.wrapped(*rows)
        loss.backward()

    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
                before = torch.cuda.memory_allocated(device)
                step()
                return (torch.cuda.max_memory_allocated(device) - before) / 1e6
            with Alive(held) as alive:
                step()
            return alive.peak / 1e6
    finally:
        for parameter in parameters:
            parameter.grad = None
