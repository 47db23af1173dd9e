"""Reversible and residual stacks, and the engine that recomputes instead of storing. Needs torch only."""
from __future__ import annotations

from .couplings import COUPLINGS, Coupling, make_coupling
from .engine import recomputing, remember
from .residual import ResidualBlock, ResidualStack
from .stack import ReversibleBlock, ReversibleStack
from .streams import GATES, INPUTS, OUTPUTS, enter, leave

__all__ = [
    "COUPLINGS",
    "GATES",
    "INPUTS",
    "OUTPUTS",
    "Coupling",
    "ResidualBlock",
    "ResidualStack",
    "ReversibleBlock",
    "ReversibleStack",
    "enter",
    "leave",
    "make_coupling",
    "recomputing",
    "remember",
]
