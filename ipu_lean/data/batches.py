"""Token files cut into training and evaluation batches: int32 tokens and labels `[rows, seq]`."""
from __future__ import annotations

from typing import Any, Dict, Iterator, Optional, Tuple

import numpy as np

from ipu_lean.data.sampler import ResumableSampler
from ipu_lean.data.tokens import TokenFile
from ipu_lean.errors import CheckpointError, ConfigError

IGNORED = -100
"""The label that a loss does not count, as in torch's cross entropy."""

SHIFT = 3
"""Tells the draws of `shift` from others of the same seed."""

Batch = Tuple[np.ndarray, np.ndarray]


def window_count(tokens: int, seq: int) -> int:
    """How many windows of `seq` inputs, each followed by one more token, fit with stride `seq`."""
    return max(0, (tokens - 1) // seq)


def check_windows(tokens: int, seq: int, rows: int = 1) -> int:
    """The number of training windows; ConfigError with the numbers if there is not even one, or fewer than `rows`."""
    windows = window_count(tokens, seq)
    if windows == 0:
        raise ConfigError(
            f"the training text has {tokens:,} tokens, and one window of `model.seq` = {seq:,} needs {seq + 1:,}",
            key="model.seq",
            value=seq,
            suggestion="use a longer text or a shorter model.seq",
        )
    if windows < rows:
        raise ConfigError(
            f"the training text has {tokens:,} tokens, which are {windows:,} windows of {seq:,}; one global batch needs {rows:,}",
            key="batch",
            suggestion="use a longer text, a shorter model.seq or a smaller global batch",
        )
    return windows


def check_vocab(model_vocab: int, tokenizer_vocab: int, extra: int = 0) -> None:
    """ConfigError unless the model has an embedding for every id and for `extra` more (a mask); further rows are padding."""
    if model_vocab < tokenizer_vocab + extra:
        mask = " and the mask is one more" if extra else ""
        raise ConfigError(
            f"the model has {model_vocab:,} embeddings, the tokenizer makes ids up to {tokenizer_vocab - 1:,}{mask}",
            key="model.vocab",
            value=model_vocab,
            suggestion=f"leave model.vocab out, or set it to at least {tokenizer_vocab + extra}",
        )


def check_rows(items: int, what: str, rows: int = 1) -> None:
    """ConfigError with the numbers if there are fewer training `items` (`what` they are, in the plural) than a batch has rows."""
    if items < rows:
        raise ConfigError(
            f"there are {items:,} {what} to train on; one global batch needs {rows:,}",
            key="batch",
            suggestion=f"use more {what} or a smaller global batch",
        )


def fill_rows(inputs: np.ndarray, labels: np.ndarray, rows: int) -> Batch:
    """A batch of `rows` rows: those that a set does not fill are zero, and their labels count nothing."""
    missing = rows - len(labels)
    if not missing:
        return inputs, labels
    blank = np.zeros((missing, *inputs.shape[1:]), inputs.dtype)
    uncounted = np.full((missing, *labels.shape[1:]), IGNORED, labels.dtype)
    return np.concatenate([inputs, blank]), np.concatenate([labels, uncounted])


class TrainBatches:
    """An endless row of training batches.

    A window is `seq + 1` tokens; windows follow each other with stride `seq`, so that every token but the first is a label once
    an epoch (the last, incomplete window is left out).

    Args:
        tokens: the training text.
        seq: context length.
        rows: rows a batch, the whole global batch.
        sampler: over `windows` windows; its state is this object's state.
        shift: in each epoch the windows begin at another place of the text, which is read on from its beginning after its end: no
            token then stands at the same place of a window every time. The place follows from the sampler's seed and the epoch.

    Raises:
        ConfigError: the text is shorter than one window or gives fewer windows than one batch has rows.
    """

    def __init__(self, tokens: TokenFile, seq: int, rows: int, sampler: ResumableSampler, shift: bool = False) -> None:
        self.shift = shift
        self.windows = check_windows(len(tokens), seq, rows)
        assert sampler.windows == self.windows, f"a sampler over {sampler.windows} windows for {self.windows}"
        self.tokens, self.seq, self.rows, self.sampler = tokens, seq, rows, sampler

    @classmethod
    def create(
        cls, tokens: TokenFile, seq: int, rows: int, *, seed: int, shuffle: bool = True, shift: bool = False
    ) -> TrainBatches:
        """The same with a sampler of the right length."""
        return cls(tokens, seq, rows, ResumableSampler(check_windows(len(tokens), seq, rows), seed, shuffle), shift)

    def next(self) -> Batch:
        """(tokens, labels), each int32 `[rows, seq]`; labels are the tokens one further on."""
        if self.shift:
            window = self._shifted()
        else:
            window = self.tokens.windows(self.sampler.next(self.rows), self.seq)
        return np.ascontiguousarray(window[:, :-1]), np.ascontiguousarray(window[:, 1:])

    def _shifted(self) -> np.ndarray:
        """The next windows, int32 `[rows, seq + 1]`, each from its epoch's beginning on."""
        sampler, length = self.sampler, len(self.tokens)
        first = sampler.epoch * self.windows + sampler.position
        numbers = sampler.next(self.rows)
        places = np.empty((self.rows, self.seq + 1), np.int64)
        for row, number in enumerate(numbers):
            epoch = (first + row) // self.windows
            start = int(np.random.RandomState([SHIFT, epoch, sampler.seed & 0xFFFFFFFF]).randint(length))
            places[row] = start + int(number) * self.seq + np.arange(self.seq + 1)
        return self.tokens.flat()[places % length].astype(np.int32)

    def state_dict(self) -> Dict[str, Any]:
        """JSON-able: where the next batch begins. The number of rows is not part of it and may change on resuming."""
        return {"seq": self.seq, "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue after the last batch taken before `state_dict()`; CheckpointError if the windows are not the same."""
        if state["seq"] != self.seq:
            raise CheckpointError(
                f"The saved data position counts windows of {state['seq']:,} tokens and model.seq is {self.seq:,}: "
                "this run cannot be continued where it stood."
            )
        self.sampler.load_state_dict(state["sampler"])


def eval_batches(tokens: TokenFile, seq: int, rows: int, limit: Optional[int] = None) -> Iterator[Batch]:
    """The text in order, each token but the first as a label exactly once.

    Every batch is int32 `[rows, seq]` (devices that compile want one shape); what the text does not fill has token 0, label -100.

    Args:
        limit: batches at most; None for the whole text.
    """
    labels_left = max(0, len(tokens) - 1)
    batches = -(-labels_left // (rows * seq))
    for number in range(batches if limit is None else min(limit, batches)):
        start = number * rows * seq
        count = min(rows * seq, labels_left - start)
        flat = tokens.read(start, count + 1)
        inputs = np.zeros(rows * seq, np.int32)
        labels = np.full(rows * seq, IGNORED, np.int32)
        inputs[:count], labels[:count] = flat[:-1], flat[1:]
        yield inputs.reshape(rows, seq), labels.reshape(rows, seq)
