"""Engines: one interface, one device kind each."""

from __future__ import annotations

from ipu_lean.train.engines.protocol import Batch, Engine, StepResult
from ipu_lean.train.engines.torch_engine import TorchEngine

__all__ = ["Batch", "Engine", "StepResult", "TorchEngine"]
