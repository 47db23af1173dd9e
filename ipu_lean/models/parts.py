"""An attention in parts: some sequences of the batch with all heads, or one sequence with some of its heads."""

from __future__ import annotations

from typing import List, Optional, Tuple

import torch


class Parts:
    """How `heads_at_once` heads at a time make a pass over a batch; a head of each sequence counts as one.

    Attributes:
        rows: sequences in a part.
        shared: whether several parts read the same sequence.
        groups: for each part, which sequences it reads (numbered in steps of `rows`).
    """

    def __init__(self, batch: int, heads: int, heads_at_once: int) -> None:
        self._heads = heads
        self.rows = max(1, heads_at_once // heads)
        self._width = min(heads, heads_at_once)
        self._per_row = -(-heads // self._width)
        self.shared = self._per_row > 1
        self.groups: List[int] = [row for row in range(-(-batch // self.rows)) for _ in range(self._per_row)]

    def heads_of(self, number: int) -> Tuple[int, int]:
        """(first head, the one after the last) of part `number`."""
        first = number % self._per_row * self._width
        return first, min(first + self._width, self._heads)

    def mask_of(self, number: int, mask: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """The part of `mask` `[batch or 1, heads or 1, seq, keys]` (leading dimensions may be missing) for its sequences."""
        if mask is None or mask.dim() < 4 or mask.shape[0] == 1:
            return mask
        first = self.groups[number] * self.rows
        return mask[first : first + self.rows]
