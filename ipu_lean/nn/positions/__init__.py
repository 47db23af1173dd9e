"""Where a token stands: rotary, learned, sinusoidal and axial positions."""

from __future__ import annotations

from ipu_lean.nn.positions.axial import AxialPositions
from ipu_lean.nn.positions.learned import LearnedPositions
from ipu_lean.nn.positions.rotary import Rotary, rotate
from ipu_lean.nn.positions.sinusoidal import SinusoidalPositions

__all__ = ["AxialPositions", "LearnedPositions", "Rotary", "SinusoidalPositions", "rotate"]
