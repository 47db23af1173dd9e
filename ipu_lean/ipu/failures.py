"""What to make of PopTorch's errors and of its silence while it compiles."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from typing import Callable, Iterator, Optional

_MEMORY = re.compile(r"out of memory|OutOfMemory|memory_allocation|bytes used", re.IGNORECASE)
LEVERS = (
    "lower batch.micro and raise batch.accumulation, set ipu.recompute_checkpoint_every_layer, lower ipu.matmul_proportion on "
    "the fullest IPU, set memory.loss_chunk, set ipu.optimizer_state_offchip or ipu.replicated_tensor_sharding, move layers off "
    "the first IPUs, use more IPUs, set ipu.partials: half, shorten model.seq"
)
_LONGEST = 600
_FIRST, _NEXT = 60.0, 300.0  # seconds until the first sign of life, and between later ones


def explain(text: str, advice: Optional[Callable[[], str]] = None) -> str:
    """PopTorch's message on one line; if memory ran out, with `advice` and the usual remedies in the usual order."""
    text = " ".join(text.split())
    short = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} […]"
    short = short.rstrip(".")
    if _MEMORY.search(text):
        tile = re.search(r"tile (\d+)[^0-9]*([\d,]+) bytes used, ([\d,]+) available", text)
        worst = f" (tile {tile.group(1)}: {tile.group(2)} of {tile.group(3)} bytes)" if tile else ""
        plan = "" if advice is None else f" {advice()}"
        return f"{short}. An IPU's memory ran out{worst}.{plan} Levers, in this order: {LEVERS}."
    return f"{short}."


@contextlib.contextmanager
def waiting(say: Callable[[str], None], what: str) -> Iterator[None]:
    """Say that something long begins, that it still goes on, and how long it took (if it took more than a moment)."""
    started, done = time.perf_counter(), threading.Event()

    def remind() -> None:
        pause = _FIRST
        while not done.wait(pause):
            minutes = (time.perf_counter() - started) / 60
            say(f"still {what} after {minutes:.0f} min; fewer layers on an IPU compile faster, ipu.executable_cache only once")
            pause = _NEXT

    say(what)
    watcher = threading.Thread(target=remind, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
    seconds = time.perf_counter() - started
    if seconds >= 1.0:
        say(f"done in {seconds:.0f} s")
