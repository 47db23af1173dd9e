"""`prepare` for images: each set becomes a folder of the cache (images.npy, labels.npy, moments.npy, manifest.json)."""
from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Optional, Tuple

import numpy as np

from ipu_lean.data import folders, store
from ipu_lean.data.batches import check_rows
from ipu_lean.data.build import Progress
from ipu_lean.data.images.batches import ImageSet
from ipu_lean.data.images.sources import ImageSource, open_images
from ipu_lean.data.sources import file_sha256
from ipu_lean.errors import ConfigError, RunError

if TYPE_CHECKING:
    from ipu_lean.config import Config

FILES = ("images.npy", "labels.npy", "moments.npy")
_ROWS = 4096
"""Images converted at a time."""


@dataclass(frozen=True)
class PreparedImages:
    """Images, ready for batches.

    Attributes:
        path: the folder of the training images. manifest: its manifest; under `sets` each set's folder and bounds, and under
        `scale` [mean, std] of the training images.
        train, validation: the sets, the latter by name in the config's order.
    """

    path: Path
    manifest: Dict[str, Any]
    train: ImageSet
    validation: Dict[str, ImageSet]

    unit, what = "images", "classes"

    @property
    def features(self) -> int:
        """Numbers in an image."""
        return int(self.manifest["features"])

    @property
    def vocab(self) -> int:
        """Classes are 0 .. vocab - 1."""
        return int(self.manifest["classes"])


def prepare_images(config: Config, progress: Optional[Progress] = None, verify: bool = False) -> PreparedImages:
    """The images of `data.images` and of every validation set, from the cache where they are there already.

    They are laid down in one fixed random order, so that a share held out from the end has all classes even where the source is
    sorted by class. Pixels are kept as they are; mean and standard deviation are those of the training images.

    Args:
        config: its `data` section. progress, verify: as `prepare` has them.

    Raises:
        ConfigError: images that are missing, damaged, too few or of another size than the training images.
        EnvironmentProblem: a package is missing, or the cache cannot be written. RunError: no room on the disk.
    """
    data, cache, report = config.data, store.cache_folder(config.data.cache), progress or (lambda stage, done, total: None)
    source = open_images(data.images or "")
    others = {
        name: open_images(value, f"data.validation.{name}") for name, value in data.validation.items() if isinstance(value, str)
    }
    path, manifest = _build(cache, source, report, verify)
    shares = {name: round(float(value) * manifest["images"]) for name, value in data.validation.items() if name not in others}
    start = manifest["images"] - sum(shares.values())
    check_rows(start, "images")
    sets: Dict[str, Dict[str, Any]] = {"train": {"folder": str(path), "start": 0, "stop": start}}
    for name in data.validation:
        if name in shares:
            sets[name] = {"folder": str(path), "start": start, "stop": start + shares[name]}
            start += shares[name]
            if not shares[name]:
                rule = f"this share of {manifest['images']:,} images is none"
                raise ConfigError(rule, key=f"data.validation.{name}", value=data.validation[name])
            continue
        folder, found = _build(cache, others[name], report, verify)
        _check_alike(manifest, found, others[name])
        sets[name] = {"folder": str(folder), "start": 0, "stop": found["images"], "sha256": _sums(found)}
    mean, std = _scale(path, sets["train"]["stop"], source)
    return _open(path, {**manifest, "sets": sets, "scale": [mean, std]})


def prepare_other(config: Config, spec: str, train: PreparedImages, key: str) -> ImageSet:
    """All of another set of images, scaled as the training images are. Raises as `prepare_images`, naming `key`."""
    source = open_images(spec, key)
    folder, found = _build(store.cache_folder(config.data.cache), source, lambda stage, done, total: None, False)
    _check_alike(train.manifest, found, source)
    images, labels = np.load(folder / FILES[0], mmap_mode="r"), np.load(folder / FILES[1])
    return ImageSet(images, labels, 0, found["images"], train.train.mean, train.train.std)


def reopen_images(path: Path, manifest: Dict[str, Any]) -> Optional[PreparedImages]:
    """What a `PreparedImages` with this path and manifest was, or None if a file is missing or has another length."""
    try:
        if any((path / name).stat().st_size != entry["bytes"] for name, entry in manifest["files"].items()):
            return None
        return _open(path, manifest)
    except (OSError, ValueError):
        return None


def image_fingerprint(manifest: Dict[str, Any]) -> Dict[str, Any]:
    """What a checkpoint's data position refers to: checksums, and the bounds of each set in images."""
    sets = {name: [entry["start"], entry["stop"], entry.get("sha256")] for name, entry in manifest["sets"].items()}
    return {"sha256": _sums(manifest), "sets": sets}


def _sums(manifest: Dict[str, Any]) -> str:
    """One checksum over images and labels."""
    return hashlib.sha256("".join(manifest["files"][name]["sha256"] for name in FILES[:2]).encode("ascii")).hexdigest()


def _open(path: Path, manifest: Dict[str, Any]) -> PreparedImages:
    mean, std = manifest["scale"]
    arrays: Dict[str, Tuple[np.ndarray, np.ndarray]] = {}
    sets = {}
    for name, entry in manifest["sets"].items():
        if entry["folder"] not in arrays:
            folder = Path(entry["folder"])
            arrays[entry["folder"]] = (np.load(folder / FILES[0], mmap_mode="r"), np.load(folder / FILES[1]))
        sets[name] = ImageSet(*arrays[entry["folder"]], entry["start"], entry["stop"], mean, std)
    train = sets.pop("train")
    return PreparedImages(path, manifest, train, sets)


def _check_alike(train: Dict[str, Any], other: Dict[str, Any], source: ImageSource) -> None:
    if other["features"] != train["features"]:
        raise ConfigError(
            f"these images have {other['features']:,} numbers each, those to train on {train['features']:,}",
            key=source.key,
            value=source.spec,
        )
    if other["classes"] > train["classes"]:
        raise ConfigError(
            f"these images have {other['classes']:,} classes, those to train on {train['classes']:,}",
            key=source.key,
            value=source.spec,
        )


def _scale(path: Path, count: int, source: ImageSource) -> Tuple[float, float]:
    """Mean and standard deviation of the first `count` images, from each image's own, in float64."""
    means, squares = np.load(path / FILES[2])[:count].T
    mean = float(means.mean())
    variance = float((squares + (means - mean) ** 2).mean())
    if not variance > 0:
        raise ConfigError("all numbers in the training images are equal", key=source.key, value=source.spec)
    return mean, variance**0.5


# Making a folder.


def _build(cache: Path, source: ImageSource, progress: Progress, verify: bool) -> Tuple[Path, Dict[str, Any]]:
    mark = folders.mark_of("images", source.identity)

    def make(work: Path) -> Dict[str, Any]:
        work.mkdir(parents=True, exist_ok=True)
        progress("read images", 0, None)
        images, labels = source.read()
        order = np.random.RandomState(0).permutation(len(labels))
        _write(work, images.reshape(len(labels), -1), labels, order)
        records = {name: {"bytes": (work / name).stat().st_size, "sha256": file_sha256(work / name)} for name in FILES}
        manifest = {
            "schema": store.SCHEMA,
            "key": mark,
            "source": {"spec": source.spec, **source.identity},
            "images": len(labels),
            "features": source.size[0],
            "classes": source.size[1],
            "files": records,
        }
        store.write_whole(work / store.MANIFEST, json.dumps(manifest, indent=2) + "\n")
        store.sync_folder(work)
        return manifest

    return folders.find_or_make(
        cache, source.name, "images", mark, make, lambda: progress("wait", 0, None), verify=verify, what="images"
    )


def _write(work: Path, images: np.ndarray, labels: np.ndarray, order: np.ndarray) -> None:
    """The three files, in the order of `order`, a part at a time."""
    dtype = np.dtype(np.uint8) if images.dtype == np.uint8 else np.dtype(np.float32)
    for name in FILES:
        with contextlib.suppress(FileNotFoundError):
            (work / name).unlink()
    shape = (len(order), images.shape[1])
    stored = np.lib.format.open_memmap(work / FILES[0], mode="w+", dtype=dtype, shape=shape)
    moments = np.empty((len(order), 2))
    for start in range(0, len(order), _ROWS):
        part = images[order[start : start + _ROWS]].astype(dtype)
        stored[start : start + _ROWS] = part
        exact = part.astype(np.float64)
        moments[start : start + _ROWS, 0] = exact.mean(1)
        moments[start : start + _ROWS, 1] = exact.var(1)
    if not np.isfinite(moments).all():
        raise RunError("the images hold numbers that float32 cannot.")
    stored.flush()
    np.save(work / FILES[1], labels[order].astype(np.int32))
    np.save(work / FILES[2], moments)
