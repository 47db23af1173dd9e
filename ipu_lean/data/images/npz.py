"""Images of the user's own: a .npz file with `x`, the images along its first axis, and `y`, their classes from 0."""
from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any, Dict, Tuple

import numpy as np

from ipu_lean.data.files import stat_digest
from ipu_lean.errors import ConfigError

MOST_CLASSES = 1 << 20
"""A label above this is taken for a mistake (a measured quantity, an identifier) and not for a class."""


def identity(path: Path) -> Dict[str, Any]:
    """Changes with the file's place, size and time."""
    return {"kind": "npz", "file": str(path.resolve()), **stat_digest([path], path.parent)}


def size(path: Path, key: str) -> Tuple[int, int]:
    """(numbers in an image, classes); of x only the header is read."""
    shape = _header(path, key)
    if len(shape) < 2:
        raise ConfigError(f"x in {path} has shape {shape}; its first axis counts images, and others must follow", key=key)
    features, classes = int(np.prod(shape[1:])), int(_classes(_array(path, "y", key), shape[0], path, key).max()) + 1
    if features < 1 or classes < 2:
        raise ConfigError(f"{path} has {features} numbers an image and {classes} class; there is nothing to learn", key=key)
    return features, classes


def read(path: Path, key: str) -> Tuple[np.ndarray, np.ndarray]:
    """(x as it is, y). ConfigError for anything that cannot be learnt."""
    size(path, key)
    images = _array(path, "x", key)
    if images.dtype.kind not in "buif":
        raise ConfigError(f"x in {path} holds {images.dtype}, and images are numbers", key=key)
    if images.dtype.kind == "f" and not np.isfinite(images).all():
        raise ConfigError(f"x in {path} holds numbers that are not finite", key=key)
    return images, _array(path, "y", key)


def _header(path: Path, key: str) -> Tuple[int, ...]:
    """The shape of x."""
    try:
        with zipfile.ZipFile(path) as archive, archive.open("x.npy") as file:
            version = np.lib.format.read_magic(file)
            read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            return tuple(read_header(file)[0])
    except KeyError:
        raise _lacks(path, "x", key) from None
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise _damaged(path, key, error) from error


def _array(path: Path, name: str, key: str) -> np.ndarray:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return np.asarray(archive[name])
    except KeyError:
        raise _lacks(path, name, key) from None
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise _damaged(path, key, error) from error


def _classes(y: np.ndarray, images: int, path: Path, key: str) -> np.ndarray:
    if y.shape != (images,) or not images:
        raise ConfigError(f"{path} holds {images:,} images, and y has shape {y.shape}", key=key)
    if y.dtype.kind not in "ui":
        raise ConfigError(f"y in {path} holds {y.dtype}, and classes are integers from 0", key=key)
    if y.min() < 0 or y.max() > MOST_CLASSES:
        wrong = int(y.min()) if y.min() < 0 else int(y.max())
        raise ConfigError(f"y in {path} holds {wrong:,}, and classes are numbered from 0", key=key)
    return y


def _lacks(path: Path, name: str, key: str) -> ConfigError:
    with zipfile.ZipFile(path) as archive:
        names = [entry[:-4] if entry.endswith(".npy") else entry for entry in archive.namelist()]
    return ConfigError(
        f"{path} holds no array {name}",
        key=key,
        suggestion=f"it holds {', '.join(names) or 'nothing'}; write it with `numpy.savez(FILE, x=images, y=classes)`",
    )


def _damaged(path: Path, key: str, error: BaseException) -> ConfigError:
    return ConfigError(f"{path} is not a readable .npz file ({error or type(error).__name__})", key=key)
