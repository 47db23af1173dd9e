"""Reversible and residual stacks, and the engine that recomputes instead of storing. Needs torch only."""
from __future__ import annotations

from .couplings import COUPLINGS, Additive, coupling_named
from .engine import recomputing, remember
from .residual import ResidualBlock, ResidualStack
from .stack import ReversibleBlock, ReversibleStack
from .streams import INPUTS, OUTPUTS, enter, leave

__all__ = [
    "COUPLINGS",
    "INPUTS",
    "OUTPUTS",
    "Additive",
    "ResidualBlock",
    "ResidualStack",
    "ReversibleBlock",
    "ReversibleStack",
    "coupling_named",
    "enter",
    "leave",
    "recomputing",
    "remember",
]
