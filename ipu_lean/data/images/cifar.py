"""CIFAR-10 (Krizhevsky 2009) as it is published: five training batches and a test batch, pickled or binary.

A pickle can run any code; here it may build arrays and nothing else.
"""
from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import numpy as np

from ipu_lean.data.files import stat_digest
from ipu_lean.errors import ConfigError

SIZE = (3072, 10)
_FOLDERS = ("", "cifar-10-batches-py", "cifar-10-batches-bin")
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}


def find(place: str, test: bool, key: str, spec: str) -> List[Path]:
    """The batches in `place` or in the folder that the archive makes there, in order. ConfigError if some are missing."""
    if not place:
        raise ConfigError("CIFAR-10 lies in a folder", key=key, value=spec, suggestion="write cifar10:FOLDER")
    folder = Path(place).expanduser()
    if folder.is_file():
        raise ConfigError(
            "this is a file; CIFAR-10 is read from the folder that its archive makes",
            key=key,
            value=spec,
            suggestion=f"unpack it with `tar xf {folder.name}` and name the folder",
        )
    if not folder.is_dir():
        raise ConfigError("there is no such folder", key=key, value=spec)
    names = ["test_batch"] if test else [f"data_batch_{number}" for number in range(1, 6)]
    most: List[str] = names
    for inner in _FOLDERS:
        for suffix in ("", ".bin"):
            missing = [name + suffix for name in names if not (folder / inner / (name + suffix)).is_file()]
            if not missing:
                return [folder / inner / (name + suffix) for name in names]
            most = missing if len(missing) < len(most) else most
    if most is not names:
        raise ConfigError(f"this folder lacks {', '.join(most)}", key=key, value=spec, suggestion="unpack the archive again")
    raise ConfigError(
        f"this folder holds no {names[0]} and no {names[0]}.bin",
        key=key,
        value=spec,
        suggestion="name the folder that cifar-10-python.tar.gz or cifar-10-binary.tar.gz makes",
    )


def identity(files: List[Path], kind: str) -> Dict[str, Any]:
    """Changes with the files' places, sizes and times."""
    return {"kind": kind, "folder": str(files[0].parent.resolve()), **stat_digest(files, files[0].parent)}


def read(files: List[Path], key: str) -> Tuple[np.ndarray, np.ndarray]:
    """(uint8 `[n, 3072]`, red, green and blue planes of 32 x 32; classes). ConfigError names a file that is damaged."""
    parts = []
    for path in files:
        try:
            images, classes = _binary(path) if path.suffix == ".bin" else _pickled(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", key=key) from error
        except _Damaged as error:
            raise ConfigError(
                f"{path} is no batch of CIFAR-10: {error}", key=key, suggestion="unpack the archive again"
            ) from error
        parts.append((images, classes))
    return np.concatenate([images for images, _ in parts]), np.concatenate([classes for _, classes in parts])


class _Damaged(Exception):
    """Why a file cannot be what it should be."""


class _Arrays(pickle.Unpickler):
    """Builds arrays, numbers, texts and their collections."""

    def find_class(self, module: str, name: str) -> Any:
        """Only numpy's own makers."""
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")


def _pickled(path: Path) -> Tuple[np.ndarray, np.ndarray]:
    with open(path, "rb") as file:
        try:
            found = _Arrays(file, encoding="bytes").load()
        except OSError:
            raise
        except Exception as error:  # a damaged pickle can end in any error
            raise _Damaged(str(error) or type(error).__name__) from error
    entries = found if isinstance(found, dict) else {}
    images, classes = _entry(entries, "data"), _entry(entries, "labels")
    if images is None or classes is None:
        raise _Damaged("it has no entries data and labels")
    images = np.asarray(images)
    if images.dtype != np.uint8 or images.ndim != 2 or images.shape[1] != SIZE[0]:
        raise _Damaged(f"its images are {images.dtype} of shape {images.shape}, not uint8 of (n, {SIZE[0]})")
    try:
        classes = np.asarray(classes, dtype=np.int64)
    except (ValueError, TypeError) as error:
        raise _Damaged("its labels are no numbers") from error
    return images, _classes(classes, len(images))


def _entry(entries: Dict[Any, Any], name: str) -> Optional[Any]:
    return entries.get(name.encode("ascii"), entries.get(name))


def _binary(path: Path) -> Tuple[np.ndarray, np.ndarray]:
    """A record is one byte of class and the image."""
    raw = np.fromfile(path, dtype=np.uint8)
    if len(raw) == 0 or len(raw) % (SIZE[0] + 1):
        raise _Damaged(f"{len(raw):,} bytes are no whole number of records of {SIZE[0] + 1:,}")
    table = raw.reshape(-1, SIZE[0] + 1)
    return table[:, 1:], _classes(table[:, 0].astype(np.int64), len(table))


def _classes(classes: np.ndarray, images: int) -> np.ndarray:
    if classes.shape != (images,) or not images:
        raise _Damaged(f"{images:,} images and labels of shape {classes.shape}")
    wrong = classes[(classes < 0) | (classes >= SIZE[1])]
    if len(wrong):
        raise _Damaged(f"a label is {wrong[0]}, and there are {SIZE[1]} classes")
    return classes
