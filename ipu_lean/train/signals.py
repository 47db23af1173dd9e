"""Ctrl-C and SIGTERM: the first asks for a stop after the step in hand, a second Ctrl-C ends the process at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any, Callable, Dict, Optional

from ipu_lean.errors import Interrupted

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignal:
    """`with StopSignal() as stop:` … `stop.requested`.

    Before `begin()` there is nothing to save, so a signal raises Interrupted where it arrives. Python delivers signals to the
    main thread only; elsewhere this object does nothing.
    """

    def __init__(self, early: str = "stopped before the first step; nothing was trained.") -> None:
        self.requested, self._running, self._early = False, False, early
        self.by_hand = False  # Ctrl-C before `begin`; of a scheduler's SIGTERM a `resume` of the same run may follow
        self._saved: Callable[[], bool] = lambda: False
        self._before: Dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        self.install()
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def install(self) -> None:
        """Take the signals (again: Lightning puts a handler of its own over SIGTERM when it starts)."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            before = signal.signal(number, self._handle)
            self._before.setdefault(number, before)

    def begin(self, saved: Callable[[], bool] = lambda: False) -> None:
        """From here on there are steps to finish and a state to save. `saved`: whether there is a checkpoint to go back to."""
        self._running, self._saved = True, saved
        self.install()

    def _handle(self, number: int, frame: Optional[FrameType]) -> None:
        if not self._running:
            self.by_hand = number == signal.SIGINT
            raise Interrupted(self._early)
        if self.requested and number == signal.SIGINT:
            _tell(f"\nstopped at once; {'the last checkpoint stands' if self._saved() else 'there is no checkpoint yet'}.\n")
            os._exit(Interrupted.exit_code)
        if not self.requested and number == signal.SIGINT:
            _tell("\nfinishing this step and saving; Ctrl-C again stops at once.\n")
        self.requested = True


def _tell(text: str) -> None:
    """Straight to file descriptor 2: a Python stream may be in the middle of a write when the signal comes."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
