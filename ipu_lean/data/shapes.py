"""What a configuration's batches look like, known before any data is read."""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ipu_lean.config import derived
from ipu_lean.data.batches import IGNORED, Batch

if TYPE_CHECKING:
    from ipu_lean.config import Config


def expected_vocab(config: Config) -> int:
    """Rows of the readout: `model.vocab`, or the tokenizer's number (of a loaded tokenizer: an estimate)."""
    return config.model.vocab or derived.tokenizer_vocab(config.data.tokenizer)


def blank_batch(config: Config, rows: int) -> Batch:
    """(inputs, labels) of the shapes and types that the model takes; the labels count nothing. Text: int32 `[rows, seq]`."""
    shape = (rows, config.model.seq)
    return np.zeros(shape, np.int32), np.full(shape, IGNORED, np.int32)
