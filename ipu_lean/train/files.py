"""Files that are either whole or not there: atomic writes, flushed directories, and a full disk told in words."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any, Iterator, Optional, Union

from ipu_lean.errors import EnvironmentProblem, IpuLeanError, RunError

# "No space left", quota exceeded, and a file-size limit: the same situation for the person at the keyboard.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_disk_full(error: BaseException) -> bool:
    """Whether `error` means that nothing more can be written (safetensors puts the number into its text only)."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    found = re.search(r"(?:os error |Os \{ code: )(\d+)", str(error))
    return (found is not None and int(found.group(1)) in _FULL) or "No space left" in str(error)


@contextlib.contextmanager
def disk_guard(what: str, run: Optional[Path] = None) -> Iterator[None]:
    """Turn "disk full" inside the block into a RunError, and a missing permission into an EnvironmentProblem, that say what
    was not written. `run`: the run directory that goes on once there is room.
    """
    try:
        yield
    except IpuLeanError:
        raise
    except Exception as error:
        if is_disk_full(error):
            remedy = "" if run is None else f" Make room, then: ipu-lean resume {shlex.quote(str(run))}"
            raise RunError(f"the disk is full (or its quota or file-size limit is reached): {what}.{remedy}") from error
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise EnvironmentProblem(f"no permission to write ({error.strerror}): {what}.") from error
        raise


def fsync_directory(path: Union[str, Path]) -> None:
    """Make renames inside `path` survive a power cut; where directories cannot be opened (Windows) there is nothing to do."""
    with contextlib.suppress(OSError):
        handle = os.open(str(path), os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def fsync_file(path: Union[str, Path]) -> None:
    """Flush one closed file to the disk."""
    with open(path, "rb") as handle:
        os.fsync(handle.fileno())


def write_atomic(path: Union[str, Path], text: str) -> None:
    """Replace `path` by `text` in one step: a reader, or a kill at any moment, meets the old file or the new one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with disk_guard(f"{path} was not replaced"):
            with open(temporary, "w", encoding="utf-8") as handle:
                handle.write(text)
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
    fsync_directory(path.parent)


def write_json(path: Union[str, Path], value: Any) -> None:
    """`write_atomic` of indented JSON; floats keep every digit (Python's repr round-trips)."""
    write_atomic(path, json.dumps(value, indent=1) + "\n")


def finite(value: Any) -> Any:
    """Plain data without the numbers that JSON has not: an infinite one (a perplexity, for one) and nan become None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Union[str, Path]) -> Optional[Any]:
    """The JSON in `path`, or None when the file is missing, unreadable or cut short."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def sha256(path: Union[str, Path]) -> str:
    """Hexadecimal SHA-256 of a file, read in blocks of 1 MiB."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:
        for block in iter(lambda: handle.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def remove_tree(path: Union[str, Path]) -> None:
    """Delete a directory so that a kill half-way never leaves one that looks whole: it is renamed first."""
    path = Path(path)
    trash = path.with_name(f".trash-{path.name}-{os.getpid()}")
    try:
        os.replace(path, trash)
    except OSError:
        trash = path
    shutil.rmtree(trash, ignore_errors=True)
