"""Batches of images: the sampler's order, exactly once an epoch and an evaluation, resumable."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ipu_lean.data import IGNORED, ResumableSampler
from ipu_lean.data.images import ImageBatches, ImageSet, image_eval_batches
from ipu_lean.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.pod


def numbered(count: int, start: int = 0) -> ImageSet:
    """Image i holds the number i three times; its class is i modulo 5."""
    images = np.repeat(np.arange(start + count, dtype=np.float32)[:, None], 3, 1)
    return ImageSet(images, np.arange(start + count, dtype=np.int32) % 5, start, start + count, 2.0, 4.0)


def numbers(images: Any) -> Any:
    return np.rint(images[:, 0] * 4 + 2).astype(int)


def test_batches_follow_the_sampler(monkeypatch: Any) -> None:
    stream, order = ImageBatches(numbered(7, start=2), 3, seed=5), ResumableSampler(7, 5)
    for _ in range(6):
        images, labels = stream.next()
        wanted = order.next(3) + 2
        assert images.dtype == np.float32 and labels.dtype == np.int32 and images.shape == (3, 3)
        assert np.array_equal(numbers(images), wanted) and np.array_equal(labels, wanted % 5)


def test_a_stream_goes_on_where_it_stood() -> None:
    stream = ImageBatches(numbered(11), 4, seed=1)
    for _ in range(4):
        stream.next()
    state, wanted = stream.state_dict(), [stream.next() for _ in range(4)]
    again = ImageBatches(numbered(11), 4, seed=9)
    again.load_state_dict(state)
    for one, other in zip(wanted, (again.next() for _ in range(4))):
        assert np.array_equal(one[0], other[0]) and np.array_equal(one[1], other[1])
    with pytest.raises(CheckpointError, match="belongs to 11 images, and there are 12"):
        ImageBatches(numbered(12), 4, seed=1).load_state_dict(state)


@pytest.mark.parametrize("rows", [1, 4, 5, 20])
def test_an_evaluation_sees_each_image_once(rows: int) -> None:
    found = list(image_eval_batches(numbered(10, start=3), rows))
    assert all(images.shape == (rows, 3) and labels.shape == (rows,) for images, labels in found)
    pairs = [pair for images, labels in found for pair in zip(numbers(images).tolist(), labels.tolist())]
    kept = [pair for pair in pairs if pair[1] != IGNORED]
    assert kept == [(number, number % 5) for number in range(3, 13)]
    assert len(list(image_eval_batches(numbered(10), rows, limit=2))) == min(2, -(-10 // rows))


def test_too_few_images_and_numbers_outside() -> None:
    with pytest.raises(ConfigError, match="3 images to train on; one global batch needs 4") as caught:
        ImageBatches(numbered(3), 4, seed=0)
    assert caught.value.key == "batch"
    with pytest.raises(IndexError):
        numbered(3, start=2).take(np.array([3]))
