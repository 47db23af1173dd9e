"""The IPU path: PopTorch options, placement, the traced step, and an emulator of PopTorch on plain PyTorch."""

from __future__ import annotations

import importlib
from typing import Any, List

_HOMES = {
    "load_poptorch": "api",
    "OptionPair": "options",
    "describe_options": "options",
    "make_options": "options",
    "Placement": "placement",
    "place": "placement",
    "PopTrainStep": "step",
    "SurrogateStep": "surrogate",
    "make_step": "surrogate",
    "to_precision": "step",
    "make_optimizer": "optimizers",
    "CheckResult": "check",
    "run_check": "check",
    "Examination": "examination",
    "Finding": "examination",
    "examine_step": "examination",
}
__all__: List[str] = [*sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    # By name, so that the contract and the emulator in this room can be used without loading the application.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
