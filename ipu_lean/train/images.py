"""The task of classifying images, and the run's own note of where they are prepared (data.json)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional

from ipu_lean.config import Config
from ipu_lean.data import PreparedImages, blank_batch, check_rows, expected_features, prepare_images
from ipu_lean.data.images import ImageBatches, image_eval_batches, image_fingerprint, reopen_images
from ipu_lean.errors import ConfigError, RunError
from ipu_lean.train.engines.protocol import Batch
from ipu_lean.train.files import read_json, write_json

Progress = Callable[[str, int, int], None]


class ImageTask:
    """The class of each image (see `tasks.Task`): batches are float32 `[rows, features]` and int32 `[rows]`."""

    tokenizer = None

    def __init__(self, config: Config, prepared: PreparedImages) -> None:
        self.config, self.prepared = config, prepared
        self.vocab = prepared.vocab
        self.validation_names = tuple(prepared.validation)

    def train_batches(self, rows: Optional[int] = None, seed: Optional[int] = None) -> ImageBatches:
        """The training images in a seeded order."""
        config = self.config
        return ImageBatches(
            self.prepared.train,
            config.batch.global_batch if rows is None else rows,
            seed=config.seed if seed is None else seed,
            shuffle=config.data.shuffle,
        )

    def eval_batches(self, name: str, rows: int, limit: Optional[int] = None) -> Iterator[Batch]:
        """The images of one validation set in order."""
        return image_eval_batches(self.prepared.validation[name], rows, limit)

    def blank(self, rows: int) -> Batch:
        """Images that nobody counts."""
        return blank_batch(self.config, rows)

    def fingerprint(self) -> Dict[str, Any]:
        """Checksum of the images and bounds of the sets."""
        return image_fingerprint(self.prepared.manifest)

    def note(self, record: Path) -> None:
        """Write data.json."""
        where = str(self.prepared.path.absolute())
        write_json(record, {"path": where, "fingerprint": self.fingerprint(), "manifest": self.prepared.manifest})


def open_image_task(config: Config, progress: Optional[Progress] = None, record: Optional[Path] = None) -> ImageTask:
    """The images that `record` (a run's data.json) notes, if they are still there; else prepared anew.

    Raises:
        RunError: prepared anew, they are not the recorded ones.
        ConfigError: fewer images than one global batch has rows, or of another size than `model.features`.
    """
    noted = read_json(record) if record is not None else None
    prepared = reopen_images(Path(noted["path"]), noted["manifest"]) if noted else None
    if prepared is None:
        prepared = prepare_images(config, progress)
        if noted and noted["fingerprint"] != image_fingerprint(prepared.manifest):
            raise RunError(
                f"the training images have changed since this run began, and its prepared copy is gone from {noted['path']}: the "
                "run cannot go on where it stood. Put the old images back, or start a new run."
            )
    if expected_features(config) != prepared.features:
        raise ConfigError(
            f"an image has {prepared.features:,} numbers",
            key="model.features",
            value=config.model.features,
            suggestion="remove it: the data says how many there are",
        )
    check_rows(len(prepared.train), "images", config.batch.global_batch)
    return ImageTask(config, prepared)
