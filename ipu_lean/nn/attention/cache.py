"""Keys and values of the tokens read so far, for generation one token at a time."""

from __future__ import annotations

from typing import Tuple

import torch

from ipu_lean.errors import ConfigError


class KVCache:
    """Room for `length` positions in each of `visits` attentions, in execution order.

    Shared layers run several times, so a place belongs to a visit and not to a module: a model calls `begin` before its first
    attention, and each attention takes the next place with `extend`. Not for training: it is written in place.

    Args:
        visits: attentions executed in a forward pass.
        length: positions at most.
    """

    def __init__(
        self, visits: int, batch: int, heads: int, length: int, head_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (visits, batch, length, heads, head_size)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.visits, self.limit = visits, length
        self.length = 0  # positions held
        self._new = 0
        self._next = 0

    def begin(self, count: int) -> None:
        """A forward pass over `count` new tokens starts. Raises ConfigError if they do not fit."""
        if self.length + count > self.limit:
            raise ConfigError(
                f"the cache holds {self.limit} positions, {self.length} are taken and {count} more were given",
                suggestion="make the cache longer (at most model.seq), or start again from the last tokens",
            )
        self._new, self._next = count, 0

    def extend(self, key: torch.Tensor, value: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Store the new keys and values `[batch, new, heads, head_size]`; return all so far, in the type of `key`."""
        assert self._next < self.visits and key.shape[1] == self._new, "begin() was not called for this pass"
        stop = self.length + self._new
        place, self._next = self._next, self._next + 1
        self.keys[place, :, self.length : stop] = key
        self.values[place, :, self.length : stop] = value
        return self.keys[place, :, :stop].to(key.dtype), self.values[place, :, :stop].to(key.dtype)

    def finish(self) -> None:
        """The forward pass is over: its tokens are held from now on."""
        assert self._next == self.visits, "some attention did not run"
        self.length += self._new

    def reset(self) -> None:
        """Forget everything; the memory is kept."""
        self.length = 0
