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
from typing import Any, Callable, Mapping, Optional, Tuple

import torch

SOURCE = Path(__file__).with_name("adamw.c")
FLAGS = ("-O3", "-std=c99", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fPIC", "-shared")
TUNED = ("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ()
"""Tried in turn: not every compiler knows these."""
KINDS = {"none": 0, "kahan": 1, "split": 2, "stochastic": 3}
log = logging.getLogger(__name__)
PART = 1 << 14  # elements a thread should have at least
TIMEOUT = 120  # seconds for the compiler


def compiler() -> Optional[str]:
    """The C compiler: $CC, or the first that is installed."""
    for name in (os.environ.get("CC", "").split(" ")[0], "cc", "gcc", "clang"):
        if name and shutil.which(name):
            return shutil.which(name)
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


def _build(cc: str, target: Path) -> None:
    """Compile into `target`, whole or not at all. Raises OSError, or RuntimeError with what the compiler said."""
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    said = ""
    with tempfile.TemporaryDirectory(dir=str(target.parent)) as folder:
        for tuned in TUNED:
            made = os.path.join(folder, "made.so")
            command = [cc, *FLAGS, *tuned, str(SOURCE), "-o", made, "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
            if done.returncode == 0:
                os.replace(made, target)
                return
            said = done.stderr.strip().splitlines()[0] if done.stderr.strip() else f"exit status {done.returncode}"
    raise RuntimeError(f"{cc}: {said}")


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


def rule() -> Callable[..., None]:
    """`any_precision_rules.update` in C, with the same arguments. Threads: as many as torch may use."""
    function, problem = library()
    assert function is not None, problem

    def run(w: Any, g: Any, m: Any, v: Any, kept: Any, lowest: Any, s: Any, index: Any, key: Any, *options: Any) -> None:
        summation, noisy, _ = options
        words = (0, 0) if key is None else [int(word) & 0xFFFFFFFF for word in key.tolist()]
        count = w.numel()

        def part(begin: int, end: int) -> None:
            wide, narrow = 2 * begin, begin
            function(
                KINDS[summation],
                noisy,
                end - begin,
                *(tensor.data_ptr() + wide for tensor in (w, g, m, v)),
                None if kept is None else kept.data_ptr() + (narrow if summation == "split" else wide),
                None if lowest is None else lowest.data_ptr() + narrow,
                s.data_ptr(),
                *words,
                begin,
            )

        threads = min(torch.get_num_threads(), max(1, count // PART))
        if threads == 1:
            part(0, count)
            return
        each = -(-count // threads // 64) * 64
        starts = range(0, count, each)
        list(_pool(threads).map(part, starts, [min(start + each, count) for start in starts]))

    return run
