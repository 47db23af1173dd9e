"""Labelled texts as training and evaluation batches: int32 `[rows, seq]`, -1 where a text has ended, and int32 `[rows]`."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Iterator, Optional

import numpy as np

from ipu_lean.data.batches import Batch, check_rows, fill_rows
from ipu_lean.data.sampler import ResumableSampler
from ipu_lean.errors import CheckpointError

ABSENT = -1
"""The token of a place where no token stands."""


@dataclass(frozen=True)
class TextSet:
    """The texts `start` .. `stop` of a prepared folder.

    Attributes:
        tokens: the ids of all texts, one after the other, usually a memory map. spans: int64 `[n, 2]`, where each text begins in
        them and how long it is.
        labels: int32 `[n]`. begin: the id that every text begins with, or None.
    """

    tokens: np.ndarray
    spans: np.ndarray
    labels: np.ndarray
    start: int
    stop: int
    begin: Optional[int] = None

    def __len__(self) -> int:
        return self.stop - self.start

    def take(self, indices: np.ndarray, seq: int) -> Batch:
        """Texts and classes by number within the set, of a longer text its first `seq` tokens; IndexError outside the set."""
        if len(indices) and not 0 <= int(np.min(indices)) <= int(np.max(indices)) < len(self):
            raise IndexError(f"texts {np.min(indices)} .. {np.max(indices)} of {len(self)}")
        places = np.asarray(indices, np.int64) + self.start
        rows = np.full((len(places), seq), ABSENT, np.int32)
        skip = 0 if self.begin is None else 1
        for row, (first, length) in zip(rows, self.spans[places]):
            count = min(int(length), seq - skip)
            row[skip : skip + count] = self.tokens[int(first) : int(first) + count]
        if self.begin is not None:
            rows[:, 0] = self.begin
        return rows, self.labels[places].astype(np.int32)


class LabelledBatches:
    """An endless row of training batches; each text comes once an epoch.

    Args:
        texts: the training texts. seq: context length. rows: of a batch, the whole global batch. seed, shuffle: see
            `ResumableSampler`.
    Raises:
        ConfigError: fewer texts than rows.
    """

    def __init__(self, texts: TextSet, seq: int, rows: int, *, seed: int, shuffle: bool = True) -> None:
        check_rows(len(texts), "texts", rows)
        self.texts, self.seq, self.rows = texts, seq, rows
        self.sampler = ResumableSampler(len(texts), seed, shuffle)

    def next(self) -> Batch:
        """(tokens, classes): int32 `[rows, seq]`, int32 `[rows]`."""
        return self.texts.take(self.sampler.next(self.rows), self.seq)

    def state_dict(self) -> Dict[str, Any]:
        """JSON-able: where the next batch begins. The number of rows is not part of it and may change on resuming."""
        return {"texts": len(self.texts), "seq": self.seq, "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue after the last batch taken before `state_dict()`; CheckpointError if it counts other texts."""
        if (state.get("texts"), state.get("seq")) != (len(self.texts), self.seq):
            raise CheckpointError(
                f"The saved data position belongs to {state.get('texts')} texts of {state.get('seq')} tokens, and there are "
                f"{len(self.texts):,} of {self.seq:,} now: this run cannot be continued where it stood."
            )
        self.sampler.load_state_dict(state["sampler"])


def labelled_eval_batches(texts: TextSet, seq: int, rows: int, limit: Optional[int] = None) -> Iterator[Batch]:
    """The set in order, each text once. All batches have `rows` rows; those that the set does not fill are token 0, label -100.

    Args:
        limit: batches at most; None for the whole set.
    """
    batches = -(-len(texts) // rows)
    for number in range(batches if limit is None else min(limit, batches)):
        found, labels = texts.take(np.arange(number * rows, min((number + 1) * rows, len(texts))), seq)
        yield fill_rows(found, labels, rows)
