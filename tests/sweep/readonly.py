"""A directory that cannot be written, for root too: root is refused by permissions like anybody else without two capabilities."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path
from typing import Iterator

import pytest

OVERRIDE, SEARCH = 1, 2  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH (linux/capability.h)


@contextlib.contextmanager
def unwritable(folder: Path) -> Iterator[None]:
    """Inside the block neither `folder` nor a folder in it takes a new file, and no file in it can be changed."""
    paths = [folder, *folder.rglob("*")]
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(modes[path] & ~0o222)
    try:
        with _like_anybody():
            yield
    finally:
        for path in paths:
            path.chmod(modes[path])


@contextlib.contextmanager
def _like_anybody() -> Iterator[None]:
    """This thread without the two capabilities; it keeps the right to take them back."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "capset"):
        pytest.skip("root can write everywhere on this system")
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then their upper halves
    assert libc.capget(header, sets) == 0
    before = sets[0]
    sets[0] = before & ~(1 << OVERRIDE | 1 << SEARCH)
    assert libc.capset(header, sets) == 0
    try:
        yield
    finally:
        sets[0] = before
        assert libc.capset(header, sets) == 0
