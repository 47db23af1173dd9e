"""The task of classifying texts, and the run's own note of where they are prepared (data.json)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional

from ipu_lean.config import Config
from ipu_lean.data import PreparedTexts, Tokenizer, blank_batch, check_rows, check_vocab, prepare_labelled
from ipu_lean.data.labelled import (
    LabelledBatches,
    expected_classes,
    labelled_eval_batches,
    labelled_fingerprint,
    reopen_labelled,
)
from ipu_lean.errors import ConfigError, RunError
from ipu_lean.train.engines.protocol import Batch
from ipu_lean.train.files import read_json, write_json

Progress = Callable[[str, int, int], None]


class LabelledTask:
    """The class of each text (see `tasks.Task`): batches are int32 `[rows, seq]`, -1 for padding, and int32 `[rows]`."""

    def __init__(self, config: Config, prepared: PreparedTexts) -> None:
        self.config, self.prepared = config, prepared
        self.vocab = config.model.vocab or prepared.vocab
        self.validation_names = tuple(prepared.validation)
        self.tokenizer: Optional[Tokenizer] = prepared.tokenizer

    def train_batches(self, rows: Optional[int] = None, seed: Optional[int] = None) -> LabelledBatches:
        """The training texts in a seeded order."""
        config = self.config
        return LabelledBatches(
            self.prepared.train,
            config.model.seq,
            config.batch.global_batch if rows is None else rows,
            seed=config.seed if seed is None else seed,
            shuffle=config.data.shuffle,
        )

    def eval_batches(self, name: str, rows: int, limit: Optional[int] = None) -> Iterator[Batch]:
        """The texts of one validation set in order."""
        return labelled_eval_batches(self.prepared.validation[name], self.config.model.seq, rows, limit)

    def blank(self, rows: int) -> Batch:
        """Texts that nobody counts."""
        return blank_batch(self.config, rows)

    def fingerprint(self) -> Dict[str, Any]:
        """Checksum of tokens and labels, and bounds of the sets."""
        return labelled_fingerprint(self.prepared.manifest)

    def note(self, record: Path) -> None:
        """Write data.json."""
        where = str(self.prepared.path.absolute())
        write_json(record, {"path": where, "fingerprint": self.fingerprint(), "manifest": self.prepared.manifest})


def open_labelled_task(
    config: Config, progress: Optional[Progress] = None, record: Optional[Path] = None
) -> LabelledTask:
    """The texts that `record` (a run's data.json) notes, if they are still there; else prepared anew.

    Raises:
        RunError: prepared anew, they are not the recorded ones.
        ConfigError: fewer texts than one global batch has rows, more classes than `model.classes`, or too few embeddings.
    """
    noted = read_json(record) if record is not None else None
    prepared = reopen_labelled(Path(noted["path"]), noted["manifest"]) if noted else None
    if prepared is None:
        prepared = prepare_labelled(config, progress)
        if noted and noted["fingerprint"] != labelled_fingerprint(prepared.manifest):
            raise RunError(
                f"the labelled texts have changed since this run began, and their prepared copy is gone from {noted['path']}: "
                "the run cannot go on where it stood. Put the old texts back, or start a new run."
            )
    found = len(prepared.classes)
    if found > expected_classes(config):
        raise ConfigError(
            f"the texts are of {found:,} classes",
            key="model.classes",
            value=config.model.classes,
            suggestion="remove it: the data says how many there are",
        )
    if config.model.vocab is not None:
        check_vocab(config.model.vocab, prepared.vocab)
    check_rows(len(prepared.train), "texts", config.batch.global_batch)
    return LabelledTask(config, prepared)
