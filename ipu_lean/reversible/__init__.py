"""Reversible and residual stacks, and the engine that recomputes instead of storing. Needs torch only."""
from __future__ import annotations

from .couplings import COUPLINGS, Coupling, make_coupling
from .division import Pieces, divided
from .engine import recomputing, remember
from .plan import Segment
from .residual import ResidualBlock, ResidualStack
from .stack import ReversibleBlock, ReversibleStack
from .streams import GATES, INPUTS, OUTPUTS, enter, leave

__all__ = [
    "COUPLINGS",
    "GATES",
    "INPUTS",
    "OUTPUTS",
    "Coupling",
    "Pieces",
    "ResidualBlock",
    "ResidualStack",
    "ReversibleBlock",
    "ReversibleStack",
    "divided",
    "Segment",
    "enter",
    "leave",
    "make_coupling",
    "recomputing",
    "remember",
]
