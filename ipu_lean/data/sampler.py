"""The order in which training windows are visited, as a position that can be saved."""
from __future__ import annotations

from typing import Any, Dict, List, Optional

import numpy as np

from ipu_lean.errors import CheckpointError

GENERATOR = "mt19937-permutation"


class ResumableSampler:
    """Window numbers, epoch after epoch; each epoch is a permutation that depends on (seed, epoch) alone.

    The permutation comes from numpy's RandomState, whose stream numpy has frozen: a run recorded under one release of numpy is
    repeated under any other. One int32 or int64 array of `windows` entries is alive at a time.

    Args:
        windows: how many there are, at least 1.
        seed: any non-negative integer.
        shuffle: False visits 0, 1, 2, ... in every epoch.
    """

    def __init__(self, windows: int, seed: int, shuffle: bool = True) -> None:
        assert windows > 0 and seed >= 0, f"{windows} windows, seed {seed}"
        self.windows, self.seed, self.shuffle = windows, seed, shuffle
        self.epoch, self.position = 0, 0
        self._order: Optional[np.ndarray] = None

    def next(self, count: int) -> np.ndarray:
        """The next `count` window numbers, int64 `[count]`; crosses into following epochs as often as needed."""
        parts: List[np.ndarray] = []
        while count > 0:
            if self.position == self.windows:
                self.epoch, self.position, self._order = self.epoch + 1, 0, None
            taken = min(count, self.windows - self.position)
            parts.append(self._take(self.position, self.position + taken))
            self.position, count = self.position + taken, count - taken
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)

    def _take(self, start: int, stop: int) -> np.ndarray:
        if not self.shuffle:
            return np.arange(start, stop)
        if self._order is None:
            self._order = epoch_order(self.windows, self.seed, self.epoch)
        return self._order[start:stop]

    def state_dict(self) -> Dict[str, Any]:
        """Plain numbers and strings: where the sampler stands."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "rng": {"generator": GENERATOR, "seed": self.seed, "shuffle": self.shuffle},
            "windows": self.windows,
        }

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue where `state` was taken, in its order (its seed and shuffle replace this sampler's).

        Raises:
            CheckpointError: the state belongs to a corpus of another length, or to another way of shuffling.
        """
        if state["windows"] != self.windows:
            raise CheckpointError(
                f"The saved data position belongs to a text of {state['windows']:,} windows, the text now has {self.windows:,}: "
                "data or model.seq have changed since, so this run cannot be continued where it stood."
            )
        if state["rng"]["generator"] != GENERATOR:
            raise CheckpointError(
                f"The saved data order was made by {state['rng']['generator']!r}; this release makes {GENERATOR!r} only."
            )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self.seed, self.shuffle = int(state["rng"]["seed"]), bool(state["rng"]["shuffle"])
        self._order = None


def epoch_order(windows: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of one epoch, `[windows]`; the seed is taken in 32-bit words, as RandomState wants them."""
    words = [epoch, seed & 0xFFFFFFFF]
    while seed > 0xFFFFFFFF:
        seed >>= 32
        words.append(seed & 0xFFFFFFFF)
    order = np.random.RandomState(words).permutation(windows)
    return order.astype(np.int32) if windows <= np.iinfo(np.int32).max else order
