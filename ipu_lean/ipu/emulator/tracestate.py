"""The trace that is going on, if any. Everything that behaves differently while PopTorch traces asks here."""
from __future__ import annotations

import threading
from typing import TYPE_CHECKING, List, Optional

if TYPE_CHECKING:
    from .recorder import Recorder

_local = threading.local()  # a loader's thread is on plain CPU while another one traces


def _recorders() -> List[Recorder]:
    if not hasattr(_local, "recorders"):
        _local.recorders = []
    return _local.recorders


def current_recorder() -> Optional[Recorder]:
    """The recorder of the trace in progress in this thread, or None on plain CPU."""
    found = _recorders()
    return found[-1] if found else None


def isRunningOnIpu() -> bool:
    """True only while a model is traced for the IPU (python/_impl.py:76); False on CPU and between calls."""
    return bool(_recorders())


def push(recorder: Recorder) -> None:
    _recorders().append(recorder)


def pop() -> None:
    _recorders().pop()
