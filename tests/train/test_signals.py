"""What a signal does, before and while training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ipu_lean.errors import Interrupted
from ipu_lean.train.signals import StopSignal

pytestmark = pytest.mark.pod


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_early_raises_later_asks(number: int) -> None:
    before = signal.getsignal(number)
    with StopSignal("nothing yet") as stop:
        with pytest.raises(Interrupted, match="nothing yet"):
            os.kill(os.getpid(), number)
        stop.begin()
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
    assert signal.getsignal(number) == before


def test_a_handler_put_over_ours_is_taken_back() -> None:
    with StopSignal() as stop:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop.begin()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested


def test_other_threads_are_left_alone() -> None:
    seen = []

    def work() -> None:
        with StopSignal() as stop:
            stop.begin()
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


@pytest.mark.parametrize("saved, words", [(True, "the last checkpoint stands"), (False, "there is no checkpoint yet")])
def test_second_ctrl_c_ends_at_once(saved: bool, words: str) -> None:
    code = (
        "import os, signal, time\nfrom ipu_lean.train.signals import StopSignal\n"
        f"with StopSignal() as stop:\n    stop.begin(lambda: {saved})\n    os.kill(os.getpid(), 2)\n"
        "    assert stop.requested\n    os.kill(os.getpid(), 2)\n"
        "    time.sleep(60)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 130 and f"stopped at once; {words}." in ended.stderr and "Traceback" not in ended.stderr
