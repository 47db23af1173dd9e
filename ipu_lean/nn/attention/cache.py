"""What attentions keep of the tokens read so far, for generation one token at a time."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from ipu_lean.errors import ConfigError


class Rows:
    """A tensor `[batch, positions, ...]` that is written position by position and grows as it needs to."""

    def __init__(self) -> None:
        self.first, self.stop = 0, 0  # positions held: first .. stop - 1
        self._data: Optional[torch.Tensor] = None

    def write(self, rows: torch.Tensor, at: int, limit: int) -> None:
        """Put `[batch, new, ...]` at the positions from `at` on, behind everything held before it.

        Args:
            limit: positions that will ever be held, so that memory is not taken beyond them.
        """
        assert self.first <= at <= self.stop, "rows follow each other"
        self.stop = at + rows.shape[1]
        self._make_room(rows, at, limit)
        assert self._data is not None
        self._data[:, at - self.first : self.stop - self.first] = rows

    def _make_room(self, rows: torch.Tensor, at: int, limit: int) -> None:
        """Memory for what is held, twice as much as before when it ran out."""
        needed, held = self.stop - self.first, at - self.first
        data = self._data
        if data is not None and data.shape[0] == rows.shape[0] and data.dtype == rows.dtype and data.shape[1] >= needed:
            return
        size = max(needed, min(limit - self.first, 2 * needed, needed if data is None else 2 * data.shape[1]))
        grown = rows.new_empty((rows.shape[0], size, *rows.shape[2:]))
        if held:
            assert data is not None
            grown[:, :held] = data[:, :held]
        self._data = grown

    def read(self, first: int = 0) -> torch.Tensor:
        """`[batch, stop - first, ...]`, the rows from position `first` on. It is the memory itself: not to be kept or changed."""
        assert self._data is not None and first >= self.first, "these rows were given up"
        return self._data[:, first - self.first : self.stop - self.first]

    def give_up(self, before: int) -> None:
        """Positions below `before` are not read any more. Memory is moved once half of it is such."""
        gone = min(before, self.stop) - self.first
        if self._data is None or gone <= 0 or 2 * gone < self._data.shape[1]:
            return
        kept = self.stop - self.first - gone
        self._data[:, :kept] = self._data[:, gone : gone + kept].clone()
        self.first += gone


class Place:
    """What one attention keeps: rows by name, and whatever else it wants to find again (`notes`)."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.rows: Dict[str, Rows] = {}
        self.notes: Dict[str, Any] = {}

    def append(self, name: str, rows: torch.Tensor, at: int) -> Rows:
        """Write `[batch, new, ...]` at position `at`; all rows of that name."""
        held = self.rows.setdefault(name, Rows())
        held.write(rows, at, self.limit)
        return held

    def clear(self) -> None:
        """Forget everything; the memory is kept."""
        self.notes.clear()
        for held in self.rows.values():
            held.first = held.stop = 0


class KVCache:
    """Room for `length` positions in each of `visits` attentions, in execution order.

    Shared layers run several times, so a place belongs to a visit and not to a module: a model calls `begin` before its first
    attention, and each attention takes the next place (`extend` for full attention, `take` for those that keep less or other
    things, see incremental.py). Not for training: it is written in place.

    Attributes:
        length: positions held.
        reused: positions that passes found here instead of computing them anew, added up over passes.

    Args:
        visits: attentions executed in a forward pass.
        length: positions at most.
        batch, heads, head_size, dtype, device: of the keys, for whoever wants to know how much a cache will take; the memory
            itself is taken when there is something to keep.
        pad: tokens that the layers see of a text, by its length, where a model pads; None: local and hashed attention pad to a
            multiple of their own chunk.
    """

    def __init__(
        self,
        visits: int,
        batch: int,
        heads: int,
        length: int,
        head_size: int,
        dtype: torch.dtype,
        device: torch.device,
        pad: Optional[Callable[[int], int]] = None,
    ) -> None:
        self.batch, self.heads, self.head_size, self.dtype, self.device = batch, heads, head_size, dtype, device
        self.visits, self.limit, self.pad = visits, length, pad
        self.length, self.reused = 0, 0
        self.new = 0  # positions of the pass that is running
        self._places: List[Place] = [Place(length) for _ in range(visits)]
        self._next = 0

    def begin(self, count: int) -> None:
        """A forward pass over `count` new tokens starts. Raises ConfigError if they do not fit."""
        if self.length + count > self.limit:
            raise ConfigError(
                f"the cache holds {self.limit} positions, {self.length} are taken and {count} more were given",
                suggestion="make the cache longer (at most model.seq), or start again from the last tokens",
            )
        self.new, self._next = count, 0

    def padded(self, length: int, chunk: int, whole: int) -> int:
        """Tokens that an attention sees of a text of `length`; `whole`: the longest that it does not cut in chunks."""
        if self.pad is not None:
            return self.pad(length)
        return length if length <= whole else -(-length // chunk) * chunk

    def take(self, count: int) -> Place:
        """The place of the attention that runs now, which has `count` new positions."""
        assert self._next < self.visits and count == self.new, "begin() was not called for this pass"
        self._next += 1
        return self._places[self._next - 1]

    def extend(self, key: torch.Tensor, value: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values `[batch, new, heads, head_size]`; return all so far."""
        place = self.take(key.shape[1])
        return place.append("keys", key, self.length).read(), place.append("values", value, self.length).read()

    def finish(self) -> None:
        """The forward pass is over: its tokens are held from now on."""
        assert self._next == self.visits, "some attention did not run"
        self.reused += self.length
        self.length += self.new

    def reset(self) -> None:
        """Forget everything; the memory is kept."""
        self.length = self.reused = 0
        for place in self._places:
            place.clear()
