"""Bytes of tensors that operations make, followed from the operation to the moment they are freed."""

from __future__ import annotations

import weakref
from typing import Any, Iterable, Set

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_COPYING = (torch.ops.aten._to_copy.default, torch.ops.aten.cat.default, torch.ops.aten.mul.Tensor)


class Alive(TorchDispatchMode):
    """Bytes of the storages that operations made and that are not freed yet: `now`, and the most so far, `peak`.

    Needs torch 2.1 or newer on CPU, where a storage has one Python object for life. Workspaces inside a kernel are not seen.

    Args:
        known: tensors that exist already; their storages do not count.
        weights: those of them whose copies are counted apart (autocast's casts, matrices joined to one or multiplied by a
            number): `copies`, the most of them `copies_peak`, and `copies_then`, what they came to at the peak. They are in `now`
            and `peak` as well.
    """

    passive = True  # code that is quicker where nobody watches stays so (nn/attention/host.py)

    def __init__(self, known: Iterable[torch.Tensor], weights: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = self.copies = self.copies_peak = self.copies_then = 0
        self._held = list(known)  # so that no new storage gets the address of one of them
        self._known: Set[int] = {tensor.untyped_storage()._cdata for tensor in self._held}
        self._weights: Set[int] = {tensor.untyped_storage()._cdata for tensor in weights}

    def _freed(self, address: int, size: int, copy: bool) -> None:
        self.now -= size
        self._known.discard(address)
        if copy:
            self.copies -= size
            self._weights.discard(address)

    def _made(self, result: Any, copy: bool) -> None:
        if isinstance(result, (list, tuple)):
            for item in result:
                self._made(item, copy)
        elif isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            address, size = storage._cdata, storage.nbytes()
            if address not in self._known:
                self._known.add(address)
                self.now += size
                if copy:
                    self.copies += size
                    self.copies_peak = max(self.copies_peak, self.copies)
                    self._weights.add(address)
                if self.now > self.peak:
                    self.peak, self.copies_then = self.now, self.copies
                weakref.finalize(storage, self._freed, address, size, copy)

    def _copies(self, function: Any, args: Any) -> bool:
        """Whether this operation makes a copy of weights."""
        if not self._weights or function not in _COPYING:
            return False
        first = args[0] if isinstance(args[0], (list, tuple)) else [arg for arg in args if isinstance(arg, torch.Tensor)]
        return all(tensor.untyped_storage()._cdata in self._weights for tensor in first)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self._made(result, self._copies(function, args))
        return result
