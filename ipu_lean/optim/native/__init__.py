"""The AdamW rules for bf16 in C, compiled on first use with whatever C compiler there is, for the processor at hand.

torch.compile's code for the same rules is bound by arithmetic, not by memory: it rounds to bf16 with eight instructions where
newer processors have one, and reads the bits of floats slowly.
"""
from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, List, Mapping, Optional, Sequence, Tuple

import torch

SOURCE = Path(__file__).with_name("adamw.c")
FLAGS = ("-O3", "-std=c99", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fPIC", "-shared")
TUNED = ("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ()
"""Tried in turn: not every compiler knows these."""
Call = Callable[[int, int], None]
KINDS = {"none": 0, "kahan": 1, "split": 2, "stochastic": 3}
log = logging.getLogger(__name__)
PART = 1 << 14  # elements a thread should have at least
TIMEOUT = 120  # seconds for the compiler


def compiler() -> Optional[Tuple[str, ...]]:
    """The C compiler's command: $CC (`gcc`, or several words such as `ccache gcc`), or the first that is installed."""
    for command in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        name, *more = command.split() or [""]
        found = shutil.which(name) if name else None
        if found is not None:
            return (found, *more)
    return None


def cache_folder() -> Path:
    """Where compiled code is kept, beside prepared text: $IPU_LEAN_CACHE, else ~/.cache/ipu_lean."""
    return Path(os.environ.get("IPU_LEAN_CACHE") or "~/.cache/ipu_lean").expanduser()


def _processor() -> str:
    """What tells processors apart for -march=native."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    return platform.machine() + next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _build(cc: Sequence[str], target: Path) -> None:
    """Compile into `target`, whole or not at all. Raises OSError, or RuntimeError with what the compiler said."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    said = ""
    with tempfile.TemporaryDirectory(dir=str(target.parent)) as folder:
        for tuned in TUNED:
            made = os.path.join(folder, "made.so")
            command = [*cc, *FLAGS, *tuned, str(SOURCE), "-o", made, "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False)
            if done.returncode == 0:
                os.replace(made, target)
                return
            said = done.stderr.strip().splitlines()[0] if done.stderr.strip() else f"exit status {done.returncode}"
    raise RuntimeError(f"{' '.join(cc)}: {said}")


@functools.lru_cache(maxsize=None)
def library() -> Tuple[Optional[Any], str]:
    """(the function, "") or (None, why not). Compiles once for each source, compiler and processor; takes about a second."""
    cc = compiler()
    if cc is None:
        return None, "there is no C compiler"
    mark = hashlib.sha256(SOURCE.read_bytes() + repr((cc, FLAGS, TUNED, _processor())).encode()).hexdigest()[:20]
    target = cache_folder() / f"adamw-{mark}.so"
    try:
        if not target.is_file():
            started = time.perf_counter()
            _build(cc, target)
            log.info("compiled the optimizer's update with %s in %.1f s; kept as %s", cc, time.perf_counter() - started, target)
        function = ctypes.CDLL(str(target)).ipu_lean_adamw
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        log.warning("the optimizer goes on without its C code: %s", error)
        return None, str(error)
    pointer, word = ctypes.c_void_p, ctypes.c_uint32
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, *[pointer] * 7, word, word, word]
    function.restype = None
    return function, ""


def usable(device: torch.device, weights: torch.dtype, kinds: Mapping[str, torch.dtype], maximize: bool) -> bool:
    """Whether the C rules are there, and for tensors of these types: weights and state in bf16, except split's bytes."""
    wanted = torch.bfloat16
    fits = all(kind == (torch.uint8 if key.startswith("low") else wanted) for key, kind in kinds.items())
    return device.type == "cpu" and weights == wanted and fits and not maximize and library()[0] is not None


@functools.lru_cache(maxsize=None)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="ipu_lean_adamw")


if hasattr(os, "register_at_fork"):  # a child has none of its parent's threads
    os.register_at_fork(after_in_child=_pool.cache_clear)


class Work:
    """`any_precision_rules.update` in C, for one update of many blocks: called with the same arguments, and ended by `finish`.

    With several threads (as many as torch may use) calls wait, so that all blocks are shared out once: waking a thread for each
    costs more than a small block. A call says with `at_once` that its gradient does not stay.
    """

    def __init__(self) -> None:
        function, problem = library()
        assert function is not None, problem
        self._function, self._threads = function, torch.get_num_threads()
        self._waiting: List[Tuple[Call, int]] = []
        self._held: List[Any] = []  # tensors that calls which wait have addresses of

    def __call__(
        self, w: Any, g: Any, m: Any, v: Any, kept: Any, lowest: Any, s: Any, index: Any, key: Any, *options: Any, at_once: bool
    ) -> None:
        """See `any_precision_rules.update`; `index` is not read."""
        summation, noisy, _ = options
        words = (0, 0) if key is None else tuple(int(word) & 0xFFFFFFFF for word in key.tolist())
        count, function = w.numel(), self._function
        addresses = [tensor.data_ptr() for tensor in (w, g, m, v)]
        after = [None if tensor is None else tensor.data_ptr() for tensor in (kept, lowest)]
        narrow = 1 if summation == "split" else 2
        scalars = s.data_ptr()

        def part(begin: int, end: int) -> None:
            function(
                KINDS[summation],
                noisy,
                end - begin,
                *(address + 2 * begin for address in addresses),
                None if after[0] is None else after[0] + narrow * begin,
                None if after[1] is None else after[1] + begin,
                scalars,
                *words,
                begin,
            )

        if self._threads == 1 or at_once:
            part(0, count)
        else:
            self._waiting.append((part, count))
            self._held += (w, g, m, v, kept, lowest, s)

    def finish(self) -> None:
        """Make the calls that wait, an equal number of elements for each thread; this one takes the first share."""
        waiting, self._waiting = self._waiting, []
        total = sum(count for _, count in waiting)
        threads = min(self._threads, max(1, total // PART))
        first, *others = shared_out(waiting, threads)
        running = [_pool(threads - 1).submit(_make, share) for share in others]
        _make(first)
        for share in running:
            share.result()
        self._held = []


def shared_out(calls: Sequence[Tuple[Call, int]], shares: int) -> List[List[Tuple[Call, int, int]]]:
    """`calls` (of begin and end; elements) cut into `shares` lists of (call, begin, end) of about equal length.

    Cuts are at multiples of 64 elements, so that two threads never write to one cache line of an aligned block.
    """
    each = max(1, -(-sum(count for _, count in calls) // shares))
    found: List[List[Tuple[Call, int, int]]] = [[] for _ in range(shares)]
    number, room = 0, each
    for call, count in calls:
        begin = 0
        while begin < count:
            end = count if number == shares - 1 else min(count, begin + -(-room // 64) * 64)
            found[number].append((call, begin, end))
            room -= end - begin
            begin = end
            if room <= 0 and number < shares - 1:
                number, room = number + 1, each
    return found


def _make(share: Sequence[Tuple[Call, int, int]]) -> None:
    for call, begin, end in share:
        call(begin, end)
