"""The trace that is going on, if any. Everything that behaves differently while PopTorch traces asks here."""
from __future__ import annotations

from typing import TYPE_CHECKING, List, Optional

if TYPE_CHECKING:
    from .recorder import Recorder

_recorders: List[Recorder] = []


def current_recorder() -> Optional[Recorder]:
    """The recorder of the trace in progress, or None on plain CPU."""
    return _recorders[-1] if _recorders else None


def isRunningOnIpu() -> bool:
    """True only while a model is traced for the IPU (python/_impl.py:76); False on CPU and between calls."""
    return bool(_recorders)


def push(recorder: Recorder) -> None:
    _recorders.append(recorder)


def pop() -> None:
    _recorders.pop()
