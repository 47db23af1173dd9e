"""The names that `data.images` can have, and what is known of each before it is read."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

import numpy as np

from ipu_lean.data.files import nearby
from ipu_lean.data.images import cifar, digits, npz
from ipu_lean.errors import ConfigError, did_you_mean

NAMES = ("digits", "cifar10", "cifar10-test")
Arrays = Tuple[np.ndarray, np.ndarray]
"""(images `[n, ...]`, numbers of any type; classes `[n]`, integers)."""


@dataclass(frozen=True)
class ImageSource:
    """One set of images.

    Attributes:
        spec: as the user wrote it. name: a short word for folder names. key: the config key that named it.
        identity: plain data that changes when the images do. size: (numbers in an image, classes).
        read: gives all of them.
    """

    spec: str
    name: str
    key: str
    identity: Dict[str, Any]
    size: Tuple[int, int]
    read: Callable[[], Arrays]


def open_images(spec: str, key: str = "data.images") -> ImageSource:
    """Find a set of images by name.

    Raises:
        ConfigError: there is no such file or folder, or it is not what its name says.
        EnvironmentProblem: `digits` without the package scikit-learn.
    """
    kind, _, place = spec.partition(":")
    if spec == "digits":
        path = digits.find(key)
        return ImageSource(spec, spec, key, digits.identity(path), digits.SIZE, lambda: digits.read(path))
    if kind in ("cifar10", "cifar10-test"):
        files = cifar.find(place, kind == "cifar10-test", key, spec)
        return ImageSource(spec, kind, key, cifar.identity(files, kind), cifar.SIZE, lambda: cifar.read(files, key))
    path = Path(spec).expanduser()
    if path.suffix == ".npz" and path.is_file():
        return ImageSource(spec, path.stem, key, npz.identity(path), npz.size(path, key), lambda: npz.read(path, key))
    raise _unknown(spec, path, key)


def image_size(spec: str, key: str = "data.images") -> Tuple[int, int]:
    """(numbers in an image, classes), from names and headers where they tell. Raises as `open_images`; needs no package."""
    if spec == "digits":
        return digits.SIZE
    if spec.partition(":")[0] in ("cifar10", "cifar10-test"):
        return cifar.SIZE
    return open_images(spec, key).size


def absolute_images(spec: Any) -> Any:
    """The same name with its path made absolute, if it has one; a number (a held-out share) stays."""
    if not isinstance(spec, str) or spec == "digits":
        return spec
    kind, colon, place = spec.partition(":")
    if kind in ("cifar10", "cifar10-test") and colon:
        return f"{kind}:{Path(place).expanduser().absolute()}"
    return str(Path(spec).expanduser().absolute()) if spec.endswith(".npz") else spec


def _unknown(spec: str, path: Path, key: str) -> ConfigError:
    if path.suffix == ".npz":
        return ConfigError("there is no such file", key=key, value=spec, suggestion=nearby(path))
    if path.is_dir():
        return ConfigError(
            "this is a folder; of folders only CIFAR-10's batches can be read",
            key=key,
            value=spec,
            suggestion=f"write cifar10:{spec}, or name a .npz file",
        )
    near = did_you_mean(spec, NAMES, cutoff=0.65)
    hint = f"did you mean `{near}`?" if near else "use digits, cifar10:FOLDER, cifar10-test:FOLDER or FILE.npz"
    return ConfigError("there are no such images", key=key, value=spec, suggestion=hint)
