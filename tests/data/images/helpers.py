"""Small image sets that a few linear layers can learn, written as the files that users have."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Tuple

import numpy as np

from ipu_lean.config import Config, make_config


def draw(count: int, shape: Tuple[int, ...] = (4, 4), classes: int = 3, seed: int = 0) -> Tuple[np.ndarray, np.ndarray]:
    """(uint8 images, classes): each class has a pattern of its own under noise; sorted by class, as a careless file is."""
    random = np.random.RandomState(seed)
    patterns = np.random.RandomState(99).randint(0, 200, (classes, *shape))
    labels = np.sort(np.arange(count) % classes)
    return (patterns[labels] + random.randint(0, 56, (count, *shape))).astype(np.uint8), labels


def write_npz(path: Path, count: int = 120, **options: Any) -> Path:
    """A .npz of `draw`."""
    images, labels = draw(count, **options)
    np.savez(path, x=images, y=labels)
    return path


def write_cifar(folder: Path, binary: bool, rows: int = 20, test: bool = True) -> Tuple[np.ndarray, np.ndarray]:
    """Five training batches and a test batch in CIFAR-10's layout; returns (images, labels) of the training batches."""
    folder.mkdir(parents=True, exist_ok=True)
    images, labels = draw(rows * 6, (3072,), 10)
    order = np.random.RandomState(1).permutation(rows * 6)
    images, labels = images[order], labels[order]
    for number in range(6 if test else 5):
        name = "test_batch" if number == 5 else f"data_batch_{number + 1}"
        part = slice(number * rows, (number + 1) * rows)
        if binary:
            np.column_stack([labels[part].astype(np.uint8), images[part]]).tofile(folder / f"{name}.bin")
            continue
        entries = {b"batch_label": b"one of them", b"labels": labels[part].tolist(), b"data": images[part]}
        (folder / name).write_bytes(pickle.dumps(entries, protocol=2))
    return images[: rows * 5], labels[: rows * 5]


def image_config(folder: Path, images: Any = None, **changes: Any) -> Config:
    """A checked configuration of a tiny mlp on `images` (a .npz of `draw` unless given)."""
    if images is None:
        images = folder / "images.npz"
        if not images.exists():
            write_npz(images)
    base = {
        "seed": 3,
        "model": {"kind": "mlp", "width": 16, "depth": 2, "activation": "relu"},
        "mup": {"base_width": 8},
        "batch": {"micro": 4, "accumulation": 2},
        "data": {"images": str(images), "validation": {"valid": 0.25}, "cache": str(folder / "cache")},
        "schedule": {"warmup": 2},
        "train": {"steps": 12, "eval_every": 4, "save_every": 4, "log_every": 2},
    }
    for name, value in changes.items():
        base[name] = {**base[name], **value} if isinstance(value, dict) and isinstance(base.get(name), dict) else value
    return make_config(**base)
