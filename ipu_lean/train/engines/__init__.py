"""Engines: one interface, one device kind each."""

from __future__ import annotations

from typing import Callable

from torch import nn

from ipu_lean.config import Config
from ipu_lean.config.layout import IPU_DEVICES
from ipu_lean.models import TrainStep
from ipu_lean.optim import build_optimizer, build_schedule
from ipu_lean.train.engines.poptorch_engine import PopTorchEngine
from ipu_lean.train.engines.protocol import Batch, DeviceFailure, Engine, StepResult
from ipu_lean.train.engines.torch_engine import TorchEngine
from ipu_lean.train.world import World

__all__ = ["Batch", "DeviceFailure", "Engine", "PopTorchEngine", "StepResult", "TorchEngine", "make_engine"]


def make_engine(
    model: nn.Module, config: Config, world: World, say: Callable[[str], None] = lambda text: None, *, train: bool = True
) -> Engine:
    """The engine of `config.device` around `model`; without `train`, one that only evaluates."""
    schedule = build_schedule(config) if train else None
    if config.device in IPU_DEVICES:
        return PopTorchEngine(model, config, schedule, world, say)
    make = (lambda wrapped: build_optimizer(wrapped, config)) if train else None
    return TorchEngine(TrainStep(model), make, schedule, config, world, say)
