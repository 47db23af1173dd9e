"""`poptorch.AsynchronousDataAccessor`: batches loaded ahead, into buffers that are used again (python/__init__.py:526-657).

PopTorch loads in another process and hands out shared memory; here a thread loads, and the ring of buffers behaves the same: what
an iteration returned is overwritten later, so clone what must be kept (batching.rst:53-86).
"""
from __future__ import annotations

import queue
import threading
from typing import Any, Iterator, List, Optional

import torch

from .enums import SharingStrategy
from .structures import flatten, rebuild


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


_END = object()


class _Worker:
    """Fills a ring of `buffer_size` batches; a buffer is free again when the user asks for the next batch."""

    def __init__(self, source: Iterator[Any], buffer_size: int) -> None:
        self.free: queue.Queue[int] = queue.Queue()
        self.full: queue.Queue[Any] = queue.Queue()
        self.buffers: List[Optional[List[torch.Tensor]]] = [None] * buffer_size
        self.held: Optional[int] = None
        self.stopped = False
        for slot in range(buffer_size):
            self.free.put(slot)
        self.thread = threading.Thread(target=self._fill, args=(source,), daemon=True)
        self.thread.start()

    def _fill(self, source: Iterator[Any]) -> None:
        try:
            for batch in source:
                slot = self.free.get()
                if self.stopped:
                    return
                self.full.put((slot, self._place(slot, batch)))
            self.full.put(_END)
        except BaseException as error:  # handed to the thread that iterates
            self.full.put(_Failure(error))

    def _place(self, slot: int, batch: Any) -> Any:
        tensors = flatten(batch)
        kept = self.buffers[slot]
        if kept is None or [tensor.shape for tensor in kept] != [tensor.shape for tensor in tensors]:
            kept = [tensor.clone() for tensor in tensors]
            self.buffers[slot] = kept
        else:
            for buffer, tensor in zip(kept, tensors):
                buffer.copy_(tensor)
        return rebuild(batch, iter(kept))

    def next(self) -> Any:
        if self.held is not None:
            self.free.put(self.held)
            self.held = None
        item = self.full.get()
        if item is _END:
            self.full.put(_END)
            raise StopIteration
        if isinstance(item, _Failure):
            raise item.error
        self.held, batch = item
        return batch

    def stop(self) -> None:
        self.stopped = True
        self.free.put(0)


def _rebatched(source: Iterator[Any], size: int, drop_last: bool) -> Iterator[Any]:
    """Batches of exactly `size` rows from batches of any; the rest at the end unless dropped."""
    kept: List[List[torch.Tensor]] = []
    structure, rows = None, 0
    for batch in source:
        tensors = flatten(batch)
        structure = batch if structure is None else structure
        kept = [[*column, tensor] for column, tensor in zip(kept or [[] for _ in tensors], tensors)]
        rows += tensors[0].shape[0]
        while rows >= size:
            columns = [torch.cat(column) for column in kept]
            yield rebuild(structure, iter([column[:size] for column in columns]))
            kept, rows = [[column[size:]] for column in columns], rows - size
    if rows and not drop_last:
        yield rebuild(structure, iter([torch.cat(column) for column in kept]))


class AsynchronousDataAccessor:
    """Iterate over a loader with its batches prepared ahead.

    Args:
        dataset: a DataLoader. buffer_size: batches in the ring, at least 1.
        rebatched_size: rows of each batch handed out; more than 1 (AssertionError otherwise), or None to leave them as loaded.
    """

    def __init__(self, dataset: Any, buffer_size: int = 3, miss_sleep_time_in_ms: float = 0.1, load_indefinitely: bool = True,
                 early_preload: bool = False, sharing_strategy: SharingStrategy = SharingStrategy.ForkServer,
                 rebatched_size: Optional[int] = None) -> None:
        assert rebatched_size is None or rebatched_size > 1, "rebatched_size must be None or greater than 1"
        self._dataset = dataset
        self._buffer_size = max(1, buffer_size)
        self.rebatched_size = rebatched_size
        self._worker: Optional[_Worker] = None
        self._terminated = False
        if early_preload:
            self._start()

    def _start(self) -> None:
        source = self._dataset._batches() if hasattr(self._dataset, "_batches") else iter(self._dataset)
        if self.rebatched_size is not None:
            source = _rebatched(source, self.rebatched_size, getattr(self._dataset, "_drop_last", True))
        self._worker = _Worker(source, self._buffer_size)

    def terminate(self) -> None:
        """Stop loading; iterating afterwards is an AssertionError."""
        if self._worker is not None:
            self._worker.stop()
        self._worker = None
        self._terminated = True

    def __len__(self) -> int:
        length = len(self._dataset)
        if self.rebatched_size and getattr(self._dataset, "_accessor", None) is not self:
            return length * self._dataset.batch_size // self.rebatched_size
        return length

    def __iter__(self) -> AsynchronousDataAccessor:
        assert not self._terminated, "The asynchronous data accessor was terminated"
        if self._worker is not None:
            self._worker.stop()
        self._start()
        return self

    def __next__(self) -> Any:
        assert self._worker is not None, "The asynchronous data accessor is not iterating"
        return self._worker.next()
