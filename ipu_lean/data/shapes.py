"""What a configuration's batches look like, known before the data is prepared."""
from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ipu_lean.config import derived
from ipu_lean.data.batches import IGNORED, Batch
from ipu_lean.data.images import image_size
from ipu_lean.data.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from ipu_lean.config import Config


def expected_vocab(config: Config) -> int:
    """What `build_model` is told of the data: the classes of the images; for text the rows of the embedding, `model.vocab` or the
    tokenizer's number and the mask's. A tokenizer that is named by its path is loaded for it; one that is to be trained has as
    many pieces as are asked for, if the text gives so many.

    Raises:
        ConfigError, EnvironmentProblem: as `load_tokenizer`, and as `image_size`.
    """
    if config.data.images is not None:
        return image_size(config.data.images)[1]
    path = config.data.tokenizer.path
    if config.model.vocab is None and path is not None:
        return load_tokenizer(path).vocab + derived.extra_rows(config.model)
    return config.model.vocab or derived.least_rows(config)


def expected_features(config: Config) -> int:
    """Numbers in one image: `model.features`, or as many as `data.images` has."""
    return config.model.features or image_size(config.data.images or "")[0]


def blank_batch(config: Config, rows: int) -> Batch:
    """(inputs, labels) of the shapes and types that the model takes; the labels count nothing.

    Text: int32 `[rows, seq]` twice. Labelled text: int32 `[rows, seq]` and `[rows]`. Images: float32 `[rows, features]`, int32
    `[rows]`.
    """
    if config.model.kind == "mlp":
        return np.zeros((rows, expected_features(config)), np.float32), np.full(rows, IGNORED, np.int32)
    shape = (rows, config.model.seq)
    labels = rows if config.model.head == "classifier" else shape
    return np.zeros(shape, np.int32), np.full(labels, IGNORED, np.int32)
