"""What a command line owes its user when something goes wrong: errors that can be explained, and quiet libraries."""

from __future__ import annotations

import errno
import os
import sys
import warnings
from typing import Any, Optional

from ipu_lean.errors import EnvironmentProblem, Interrupted, IpuLeanError, RunError


def known(error: BaseException) -> Optional[IpuLeanError]:
    """The error as one that we can explain, or None for a bug of ours, which deserves its traceback."""
    if isinstance(error, IpuLeanError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("interrupted; nothing was changed.")
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] != "ipu_lean":
        return EnvironmentProblem(f"the package {error.name} is missing; `ipu-lean doctor` says what this machine lacks.")
    if isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return EnvironmentProblem(f"the system refuses access{where}: {error.strerror}.")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return RunError(f"the disk is full{where}: make room and try again.")
        if error.errno is not None:
            return RunError(f"the system reports: {error.strerror}{where}.")
    if isinstance(error, MemoryError) or "allocate memory" in str(error) or "out of memory" in str(error).lower():
        advice = "lower batch.micro (and raise batch.accumulation), model.seq or memory.loss_chunk."
        return RunError(f"memory ran out; {advice}")
    return None


def quieten() -> None:
    """Shows our own warnings as one line each and none of the libraries'; `python -W` and PYTHONWARNINGS still have their way."""
    if sys.warnoptions or os.environ.get("PYTHONWARNINGS"):
        return
    os.environ["PYTHONWARNINGS"] = "ignore"  # for processes that DDP starts
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("default", category=UserWarning, module=r"ipu_lean(\.|$)")

    def show(message: Any, *_: Any, **__: Any) -> None:
        print(f"ipu-lean: warning: {' '.join(str(message).split())}", file=sys.stderr)

    warnings.showwarning = show
