"""Files of the token cache: written whole or not at all, checked when they are found again, by one process at a time."""
from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Union

import numpy as np

from ipu_lean.data.sources import BLOCK, file_sha256
from ipu_lean.errors import EnvironmentProblem, RunError

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

MANIFEST = "manifest.json"
SCHEMA = 1
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def cache_folder(given: Optional[str]) -> Path:
    """Where prepared text is kept: `given` (data.cache), else $IPU_LEAN_CACHE, else ~/.cache/ipu_lean."""
    return Path(given or os.environ.get("IPU_LEAN_CACHE") or "~/.cache/ipu_lean").expanduser()


@contextlib.contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn the system's errors on writing in `folder` into a RunError (no room) or an EnvironmentProblem (not allowed)."""
    try:
        yield
    except OSError as error:
        place = error.filename or folder
        if isinstance(error, ConnectionError):  # a progress callback's closed pipe, for one, is not about the folder
            raise
        if error.errno in NO_ROOM:
            written = sum(entry.stat().st_size for entry in folder.rglob("*") if entry.is_file()) if folder.is_dir() else 0
            above = next((parent for parent in (folder, *folder.parents) if parent.exists()), Path("/"))
            raise RunError(
                f"No room to write {place} ({error.strerror}): {written:,} bytes are written there and "
                f"{shutil.disk_usage(above).free:,} are free. Make room, or set data.cache to another disk; what is written is "
                "kept and the next call goes on from there."
            ) from error
        raise EnvironmentProblem(
            f"Prepared text cannot be written to {place}: {error.strerror}. Set data.cache to a folder of yours."
        ) from error


@contextlib.contextmanager
def exclusive(path: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold the lock file `path`; waits for another process that holds it, and calls `waiting` ten times a second meanwhile.

    Yields False where the file system has no locks. The system takes the lock back when its holder dies, by whatever signal.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        locked = fcntl is not None
        while locked:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    waiting()
                    time.sleep(0.1)
                elif error.errno != errno.EINTR:
                    locked = False
        yield locked


def write_whole(path: Path, content: Union[str, bytes]) -> None:
    """Write a small file so that a reader, or a power cut, finds the old content or the new one; one writer at a time."""
    beside = path.with_name(path.name + ".tmp")
    with open(beside, "wb") as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, where the system allows a folder to be opened for that."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


class TokenWriter:
    """Appends ids to a token file and keeps count and checksum.

    Args:
        path: the file.
        dtype: how an id is stored.
        state: what `commit` returned; the file is cut back to that point and continued. None starts the file anew.

    Raises:
        ValueError: the file does not begin with what `state` says.
    """

    def __init__(self, path: Path, dtype: np.dtype, state: Optional[Dict[str, Any]] = None) -> None:
        self.path, self.dtype, self.tokens = path, dtype, 0
        self._digest = hashlib.sha256()
        if state is None:
            self._file = open(path, "wb", buffering=BLOCK)  # noqa: SIM115 - closed by close()
            return
        self._file = open(path, "r+b", buffering=BLOCK)  # noqa: SIM115
        self.tokens, left = state["tokens"], state["tokens"] * dtype.itemsize
        while left > 0:
            block = self._file.read(min(BLOCK, left))
            if not block:
                break
            self._digest.update(block)
            left -= len(block)
        if left or self._digest.hexdigest() != state["sha256"]:
            self._file.close()
            raise ValueError(f"{path} does not begin with the {state['tokens']} tokens that were committed")
        self._file.seek(self.tokens * dtype.itemsize)
        self._file.truncate()

    def write(self, ids: np.ndarray) -> None:
        """Append ids `[n]`, all within the stored type."""
        content = ids.astype(self.dtype).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self.tokens += len(ids)

    def commit(self) -> Dict[str, Any]:
        """Make everything written so far durable; the returned state continues from here in another process."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"tokens": self.tokens, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        """Close the file. After an error, what is still buffered may have no room: that is not a second error."""
        with contextlib.suppress(OSError):
            self._file.close()


def file_records(folder: Path, known: Dict[str, str]) -> Dict[str, Dict[str, Any]]:
    """`{relative name: {bytes, sha256}}` of the token file and the tokenizer in `folder`.

    Args:
        known: checksums computed already, by relative name.
    """
    sums = dict(known)
    for path in sorted((folder / "tokenizer").iterdir()):
        sums[path.relative_to(folder).as_posix()] = file_sha256(path)
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256} for name, sha256 in sums.items()}


def read_json(path: Path) -> Optional[Dict[str, Any]]:
    """The object in a JSON file; None if the file is missing, cut short or something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def find_damage(folder: Path, manifest: Optional[Dict[str, Any]], key: str, verify: bool) -> Optional[str]:
    """What is wrong with prepared text, as words; None if it is whole. The tokens' checksum is compared only with `verify`."""
    if manifest is None:
        return f"{MANIFEST} is missing or unreadable"
    if manifest.get("schema") != SCHEMA or manifest.get("key") != key:
        return f"{MANIFEST} is of another release"
    for name, record in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != record["bytes"]:
            return f"{name} has {path.stat().st_size:,} bytes instead of {record['bytes']:,}"
        if (verify or name.startswith("tokenizer/")) and file_sha256(path) != record["sha256"]:
            return f"{name} has another checksum than when it was written"
    return None


def publish(work: Path, final: Path) -> None:
    """Move a finished folder to its name; what stood there before is removed.

    Where there are no locks, another process may get there between; its folder, made from the same text, is as good as ours.
    """
    old = final.with_name(f".{final.name}.{os.getpid()}.old")
    with contextlib.suppress(FileNotFoundError):
        os.rename(final, old)
    try:
        os.rename(work, final)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(work)
    sync_folder(final.parent)
    for old in final.parent.glob(f".{final.name}.*.old"):
        shutil.rmtree(old, ignore_errors=True)
