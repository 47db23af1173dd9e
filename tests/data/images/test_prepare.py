"""Images in the cache: every image once, a held-out share that is fair, numbers scaled by the training images, damage noticed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipu_lean.data.images import npz, prepare_images, reopen_images
from ipu_lean.data.images.prepare import image_fingerprint, prepare_other
from ipu_lean.errors import ConfigError
from tests.data.images.helpers import draw, image_config, write_cifar, write_npz

pytestmark = pytest.mark.pod


def everything(images: Any) -> Any:
    return images.take(np.arange(len(images)))


def test_every_image_once_and_scaled_by_the_training_images(tmp_path: Path) -> None:
    prepared = prepare_images(image_config(tmp_path))
    parts = [everything(prepared.train), everything(prepared.validation["valid"])]
    assert [len(part[1]) for part in parts] == [90, 30] and prepared.features == 16 and prepared.vocab == 3
    flat = parts[0][0].astype(np.float64)
    assert flat.mean() == pytest.approx(0, abs=1e-6) and flat.std() == pytest.approx(1, abs=1e-6)
    scale = prepared.manifest["scale"]
    source, labels = draw(120)
    found = np.concatenate([part[0] for part in parts]) * scale[1] + scale[0]
    rows = np.column_stack([np.concatenate([part[1] for part in parts]), np.rint(found)])
    wanted = np.column_stack([labels, source.reshape(120, -1)])
    assert np.array_equal(rows[np.lexsort(rows.T)], wanted[np.lexsort(wanted.T)])


def test_a_file_that_is_sorted_by_class_still_holds_out_every_class(tmp_path: Path) -> None:
    prepared = prepare_images(image_config(tmp_path))
    held_out = everything(prepared.validation["valid"])[1]
    assert set(held_out) == {0, 1, 2} and not np.array_equal(np.sort(held_out), held_out)


@pytest.mark.parametrize("dtype", [np.float64, np.int32, bool])
def test_other_types_keep_their_values(tmp_path: Path, dtype: Any) -> None:
    noise = np.random.RandomState(0).randn(40, 6)
    x = noise > 0 if dtype is bool else (noise * 1000).astype(dtype)
    np.savez(tmp_path / "own.npz", x=x, y=np.arange(40) % 2)
    prepared = prepare_images(image_config(tmp_path, tmp_path / "own.npz"))
    mean, std = prepared.manifest["scale"]
    found = np.concatenate([everything(prepared.train)[0], everything(prepared.validation["valid"])[0]]) * std + mean
    assert np.allclose(np.sort(found.ravel()), np.sort(x.astype(np.float64).ravel()), rtol=1e-5, atol=1e-3)


def test_the_second_call_reads_no_source(tmp_path: Path, monkeypatch: Any) -> None:
    first = prepare_images(image_config(tmp_path))
    monkeypatch.setattr(npz, "read", lambda *_: pytest.fail("read again"))
    again = prepare_images(image_config(tmp_path, data={"validation": {"valid": 0.5}}))
    assert again.path == first.path and len(again.train) == 60
    assert image_fingerprint(again.manifest) != image_fingerprint(first.manifest)


def test_damage_in_the_cache_is_mended(tmp_path: Path, caplog: Any) -> None:
    config = image_config(tmp_path)
    first = prepare_images(config)
    before = everything(first.train)
    (first.path / "images.npy").write_bytes(b"short")
    assert reopen_images(first.path, first.manifest) is None
    with caplog.at_level(logging.WARNING):
        again = prepare_images(config)
    assert "images" in caplog.text and "is made again" in caplog.text
    assert np.array_equal(everything(again.train)[0], before[0])
    raw = bytearray((again.path / "images.npy").read_bytes())
    raw[-1] ^= 1
    (again.path / "images.npy").write_bytes(bytes(raw))
    mended = prepare_images(config, verify=True)
    assert np.array_equal(everything(mended.train)[0], before[0])


def test_another_file_as_validation_is_scaled_by_the_training_images(tmp_path: Path) -> None:
    other = write_npz(tmp_path / "other.npz", 50, seed=5)
    config = image_config(tmp_path, data={"validation": {"valid": 0.25, "other": str(other)}})
    prepared = prepare_images(config)
    mean, std = prepared.manifest["scale"]
    found = everything(prepared.validation["other"])[0] * std + mean
    assert np.allclose(np.sort(found.ravel()), np.sort(draw(50, seed=5)[0].astype(float).ravel()), atol=1e-3)
    assert list(prepared.validation) == ["valid", "other"] and len(prepared.train) == 90
    alone = prepare_other(config, str(other), prepared, "--data")
    assert np.array_equal(everything(alone)[0], everything(prepared.validation["other"])[0])


def test_the_test_batch_of_cifar(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar", binary=True)
    spec = f"{tmp_path}/cifar"
    config = image_config(tmp_path, f"cifar10:{spec}", data={"validation": {"test": f"cifar10-test:{spec}"}})
    prepared = prepare_images(config)
    assert (len(prepared.train), len(prepared.validation["test"]), prepared.features, prepared.vocab) == (100, 20, 3072, 10)
    assert everything(prepared.validation["test"])[0].dtype == np.float32


def test_sets_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    write_npz(tmp_path / "wide.npz", shape=(5, 5))
    write_npz(tmp_path / "many.npz", classes=4)
    np.savez(tmp_path / "flat.npz", x=np.ones((9, 16)), y=np.arange(9) % 3)
    for validation, key, words in [
        ({"other": str(tmp_path / "wide.npz")}, "data.validation.other", "25 numbers each, those to train on 16"),
        ({"other": str(tmp_path / "many.npz")}, "data.validation.other", "4 classes, those to train on 3"),
        ({"other": "none.npz"}, "data.validation.other", "no such file"),
        ({"valid": 0.001}, "data.validation.valid", "is none"),
    ]:
        with pytest.raises(ConfigError) as caught:
            prepare_images(image_config(tmp_path, data={"validation": validation}))
        assert caught.value.key == key and words in str(caught.value), str(caught.value)
    with pytest.raises(ConfigError, match="are equal"):
        prepare_images(image_config(tmp_path, tmp_path / "flat.npz"))


def test_a_call_goes_over_what_a_killed_one_has_left(tmp_path: Path) -> None:
    config = image_config(tmp_path)
    wanted = prepare_images(config)
    labels = everything(wanted.train)[1]
    half = wanted.path.with_name(f".{wanted.path.name}.part")
    wanted.path.rename(half)
    (half / "manifest.json").unlink()
    (half / "images.npy").write_bytes(b"half")
    again = prepare_images(config)
    assert again.manifest == wanted.manifest and not half.exists()
    assert np.array_equal(everything(again.train)[1], labels)
