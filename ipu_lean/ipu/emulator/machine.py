"""The emulated machine: how many IPUs it has, and which executor holds them.

By default an attached executor holds all of them, as when a model fills its POD: a second one must wait until the first calls
`detachFromDevice`. `set_machine(16)` makes a machine of 16 IPUs, on which executors share as long as they fit.
"""
from __future__ import annotations

import gc
import weakref
from typing import Any, Dict, Optional

from .errors import Error

_size: Optional[int] = None
_held: Dict[int, Any] = {}


def set_machine(ipus: Optional[int]) -> None:
    """Number of IPUs; None: however many the first executor asks for."""
    global _size
    _size = ipus


def size() -> Optional[int]:
    return _size


def _owners() -> Dict[int, Any]:
    return {key: entry for key, entry in _held.items() if entry[0]() is not None}


def acquire(owner: Any, count: int) -> None:
    """Attach `owner` to `count` IPUs; Error when they are not free."""
    if _blocked(count):
        gc.collect()  # an executor that nobody holds any more gives its IPUs back
    blocked = _blocked(count)
    if blocked:
        raise Error(f"Failed to acquire {count} IPU(s): {blocked}")
    _held[id(owner)] = (weakref.ref(owner), count)


def _blocked(count: int) -> str:
    held = _owners()
    _held.clear()
    _held.update(held)
    taken = sum(entry[1] for entry in held.values())
    if _size is None:
        return f"another model is attached to {taken}. Call its detachFromDevice() first" if held else ""
    if taken + count > _size:
        return f"the machine has {_size} of which {taken} are in use. Detach another model first"
    return ""


def release(owner: Any) -> None:
    _held.pop(id(owner), None)


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Whether the emulated machine has that many IPUs."""
    return _size is None or num_ipus <= _size


def ipuHardwareVersion() -> int:
    """2: the emulated machine is of the Mk2 generation."""
    return 2
