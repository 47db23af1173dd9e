"""What is learnt, as far as the rest of the room cares: batches to train on, batches to measure on, and what identifies them.

A batch is (inputs, labels), batch dimension first: int32 `[rows, seq]` twice for text, int32 `[rows, seq]` and `[rows]` for
labelled texts, float32 `[rows, features]` and int32 `[rows]` for images. A "token" is a label, whatever the task.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional, Protocol, Tuple

from ipu_lean.config import Config
from ipu_lean.data import (
    MaskedBatches,
    Masking,
    Prepared,
    Tokenizer,
    TrainBatches,
    blank_batch,
    eval_batches,
    masked_eval_batches,
)
from ipu_lean.data.masked import check_whole_window
from ipu_lean.train import corpus
from ipu_lean.train.engines.protocol import Batch
from ipu_lean.train.images import open_image_task
from ipu_lean.train.labelled import open_labelled_task

Progress = Callable[[str, int, int], None]


class BatchStream(Protocol):
    """Training batches without end, from a position that can be saved."""

    def next(self) -> Batch:
        """The next global batch."""

    def state_dict(self) -> Dict[str, Any]:
        """Plain JSON: where the next batch begins."""

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Go on from there. CheckpointError if the data is not the same."""


class Task(Protocol):
    """The data of one configuration, prepared.

    Attributes:
        config: whose data it is. vocab: rows of the readout, to be given to `build_model`.
        validation_names: sets that can be measured on; the first one decides which checkpoint is best.
        tokenizer: what turns tokens into text; None where there is no text to generate.
    """

    config: Config
    vocab: int
    validation_names: Tuple[str, ...]
    tokenizer: Optional[Tokenizer]

    def train_batches(self, rows: Optional[int] = None, seed: Optional[int] = None) -> BatchStream:
        """A stream from its beginning.

        Args:
            rows: of each batch; the configuration's global batch unless given. seed: of the order; the configuration's.
        Raises:
            ConfigError: there is less data than one batch has rows.
        """

    def eval_batches(self, name: str, rows: int, limit: Optional[int] = None) -> Iterator[Batch]:
        """A validation set in order, each label exactly once; rows that it does not fill have labels that count nothing.

        Args:
            limit: batches at most; None for the whole set.
        """

    def blank(self, rows: int) -> Batch:
        """A batch whose labels count nothing."""

    def fingerprint(self) -> Dict[str, Any]:
        """Plain JSON that changes when the data, or the way it is cut, does."""

    def note(self, record: Path) -> None:
        """Write down where the prepared data is, so that `open_task(config, record=...)` finds the same."""


class TextTask:
    """Next-token prediction on a prepared text (see `Task`)."""

    def __init__(self, config: Config, prepared: Prepared) -> None:
        self.config, self.prepared = config, prepared
        self.vocab = config.model.vocab or prepared.vocab
        self.validation_names = tuple(prepared.validation)
        self.tokenizer: Optional[Tokenizer] = prepared.tokenizer

    def train_batches(self, rows: Optional[int] = None, seed: Optional[int] = None) -> TrainBatches:
        """Windows of `model.seq` tokens in a seeded order."""
        config = self.config
        return TrainBatches.create(
            self.prepared.train,
            config.model.seq,
            config.batch.global_batch if rows is None else rows,
            seed=config.seed if seed is None else seed,
            shuffle=config.data.shuffle,
            shift=config.data.shift,
        )

    def eval_batches(self, name: str, rows: int, limit: Optional[int] = None) -> Iterator[Batch]:
        """The text of one validation set in order."""
        return eval_batches(self.prepared.validation[name], self.config.model.seq, rows, limit)

    def blank(self, rows: int) -> Batch:
        """Tokens that nobody counts."""
        return blank_batch(self.config, rows)

    def fingerprint(self) -> Dict[str, Any]:
        """Checksum of the tokens and bounds of the sets."""
        return corpus.fingerprint(self.prepared)

    def note(self, record: Path) -> None:
        """Write data.json."""
        corpus.note(self.prepared, record)


class MaskedTask(TextTask):
    """Finding the hidden tokens of a prepared text (see `Task`). Validation sets hide the same tokens in every run."""

    def __init__(self, config: Config, prepared: Prepared, key: Optional[str] = None) -> None:
        """`key` names what the validation sets come from in an error; `data.validation.NAME` unless given."""
        super().__init__(config, prepared)
        self.vocab = config.model.vocab or prepared.vocab + 1
        self.masking = Masking(prepared.vocab, config.data.mask_share)
        for name, tokens in prepared.validation.items():
            place, value = key or f"data.validation.{name}", config.data.validation.get(name)
            check_whole_window(len(tokens), config.model.seq, place, value)

    def train_batches(self, rows: Optional[int] = None, seed: Optional[int] = None) -> TrainBatches:
        """Windows of `model.seq` tokens in a seeded order, some of them hidden."""
        config = self.config
        return MaskedBatches.create(
            self.prepared.train,
            config.model.seq,
            config.batch.global_batch if rows is None else rows,
            self.masking,
            seed=config.seed if seed is None else seed,
            shuffle=config.data.shuffle,
        )

    def eval_batches(self, name: str, rows: int, limit: Optional[int] = None) -> Iterator[Batch]:
        """The text of one validation set in order."""
        return masked_eval_batches(self.prepared.validation[name], self.config.model.seq, rows, self.masking, limit)


def text_task(config: Config, prepared: Prepared, key: Optional[str] = None) -> TextTask:
    """What the model's head makes of a running text."""
    return MaskedTask(config, prepared, key) if config.model.head == "masked-lm" else TextTask(config, prepared)


def open_task(config: Config, progress: Optional[Progress] = None, record: Optional[Path] = None) -> Task:
    """The configuration's data: prepared now, or found prepared.

    Args:
        progress: told `(stage, done, total)` while data is prepared.
        record: a run's data.json; the data that it notes is taken as long as it is there.
    Raises:
        ConfigError: data that is missing, unreadable or too little. EnvironmentProblem: a package is missing.
        RunError: what is there is not what `record` notes.
    """
    if config.data.images is not None:
        return open_image_task(config, progress, record)
    if config.model.head == "classifier":
        return open_labelled_task(config, progress, record)
    return text_task(config, corpus.obtain(config, record, progress))
