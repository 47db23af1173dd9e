"""Standardised images cut into training and evaluation batches: float32 `[rows, features]` and int32 `[rows]`."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, Iterator, Optional

import numpy as np

from ipu_lean.data.batches import Batch, check_rows, fill_rows
from ipu_lean.data.sampler import ResumableSampler
from ipu_lean.errors import CheckpointError


@dataclass(frozen=True)
class ImageSet:
    """The images `start` .. `stop` of a prepared folder.

    Attributes:
        images: `[n, features]`, uint8 or float32, usually a memory map. labels: int32 `[n]`.
        mean, std: of all numbers of the training images, so that those come out with mean 0 and standard deviation 1.
    """

    images: np.ndarray
    labels: np.ndarray
    start: int
    stop: int
    mean: float
    std: float

    def __len__(self) -> int:
        return self.stop - self.start

    def take(self, indices: np.ndarray) -> Batch:
        """Images and classes by number within the set; IndexError outside it."""
        if len(indices) and not 0 <= int(np.min(indices)) <= int(np.max(indices)) < len(self):
            raise IndexError(f"images {np.min(indices)} .. {np.max(indices)} of {len(self)}")
        places = np.asarray(indices) + self.start
        images = (self.images[places].astype(np.float32) - np.float32(self.mean)) / np.float32(self.std)
        return images, np.asarray(self.labels[places]).astype(np.int32)


class ImageBatches:
    """An endless row of training batches; each image comes once an epoch.

    Args:
        images: the training images. rows: of a batch, the whole global batch. seed, shuffle: see `ResumableSampler`.
    Raises:
        ConfigError: fewer images than rows.
    """

    def __init__(self, images: ImageSet, rows: int, *, seed: int, shuffle: bool = True) -> None:
        check_rows(len(images), "images", rows)
        self.images, self.rows = images, rows
        self.sampler = ResumableSampler(len(images), seed, shuffle)

    def next(self) -> Batch:
        """(images, classes): float32 `[rows, features]`, int32 `[rows]`."""
        return self.images.take(self.sampler.next(self.rows))

    def state_dict(self) -> Dict[str, Any]:
        """JSON-able: where the next batch begins. The number of rows is not part of it and may change on resuming."""
        return {"images": len(self.images), "sampler": self.sampler.state_dict()}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Continue after the last batch taken before `state_dict()`; CheckpointError if it counts other images."""
        if state.get("images") != len(self.images):
            raise CheckpointError(
                f"The saved data position belongs to {state.get('images')} images, and there are {len(self.images):,} now: this "
                "run cannot be continued where it stood."
            )
        self.sampler.load_state_dict(state["sampler"])


def image_eval_batches(images: ImageSet, rows: int, limit: Optional[int] = None) -> Iterator[Batch]:
    """The set in order, each image once. All batches have `rows` rows; those that the set does not fill are zero, labelled -100.

    Args:
        limit: batches at most; None for the whole set.
    """
    batches = -(-len(images) // rows)
    for number in range(batches if limit is None else min(limit, batches)):
        found, labels = images.take(np.arange(number * rows, min((number + 1) * rows, len(images))))
        yield fill_rows(found, labels, rows)
