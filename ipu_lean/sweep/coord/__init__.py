"""Coordinate checks: how a model's activations, updates and scores scale with its width and depth."""

from __future__ import annotations

from ipu_lean.sweep.coord.capture import measure
from ipu_lean.sweep.coord.rig import Rig, rig_of

__all__ = ["Rig", "measure", "rig_of"]
