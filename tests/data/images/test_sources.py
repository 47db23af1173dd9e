"""Each kind of image source gives what was written, and says in one sentence what is wrong with anything else."""

from __future__ import annotations

import gzip
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ipu_lean.data.images import absolute_images, digits, image_size
from ipu_lean.data.images.sources import open_images
from ipu_lean.errors import ConfigError, EnvironmentProblem
from tests.data.images.helpers import draw, write_cifar, write_npz

pytestmark = pytest.mark.pod


def test_digits_are_those_of_scikit_learn() -> None:
    datasets = pytest.importorskip("sklearn.datasets", reason="scikit-learn is an extra")
    images, labels = open_images("digits").read()
    wanted = datasets.load_digits()
    assert np.array_equal(images, wanted.data) and np.array_equal(labels, wanted.target)
    assert image_size("digits") == (64, 10) == (images.shape[1], labels.max() + 1)


def test_digits_without_the_package_say_how_to_get_it(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(digits, "package_folder", lambda name: None)
    with pytest.raises(EnvironmentProblem, match=r"pip install scikit-learn.*extra `images`"):
        open_images("digits")
    assert image_size("digits") == (64, 10)  # known all the same
    monkeypatch.setattr(digits, "package_folder", lambda name: tmp_path)
    with pytest.raises(EnvironmentProblem, match="has no digits.csv.gz"):
        open_images("digits")
    place = tmp_path / "datasets" / "data" / "digits.csv.gz"
    place.parent.mkdir(parents=True)
    for content in (b"no gzip", gzip.compress(b"1,2,3\n4,5,6\n"), gzip.compress(b"1,2\nthree,4\n")):
        place.write_bytes(content)
        with pytest.raises(EnvironmentProblem, match="install scikit-learn again"):
            open_images("digits").read()


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("inside", ["", "cifar-10-batches-py"])
def test_cifar_in_both_formats(tmp_path: Path, binary: bool, inside: str) -> None:
    wanted, classes = write_cifar(tmp_path / inside, binary)
    images, labels = open_images(f"cifar10:{tmp_path}").read()
    assert np.array_equal(images, wanted) and np.array_equal(labels, classes) and images.dtype == np.uint8
    assert open_images(f"cifar10-test:{tmp_path}").read()[0].shape == (20, 3072)
    assert image_size(f"cifar10:{tmp_path}") == (3072, 10)


class _Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["HARM"],)


def test_a_pickle_builds_arrays_and_does_nothing_else(tmp_path: Path, monkeypatch: Any) -> None:
    write_cifar(tmp_path, binary=False)
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps({b"data": _Harmful(), b"labels": [1]}))
    with pytest.raises(ConfigError, match="data_batch_3.* asks for .*mkdir"):
        open_images(f"cifar10:{tmp_path}").read()
    assert not (tmp_path / "harm").exists()


def _batch(**entries: Any) -> bytes:
    return pickle.dumps({name.encode(): value for name, value in entries.items()}, protocol=2)


IMAGES = np.zeros((2, 3072), np.uint8)


@pytest.mark.parametrize(
    "content, words",
    [
        (b"", "Ran out of input"),
        (b"some text", "is no batch"),
        (pickle.dumps([1, 2]), "no entries data and labels"),
        (_batch(data=IMAGES), "no entries data and labels"),
        (_batch(data=IMAGES.astype(np.float32), labels=[0, 1]), "float32"),
        (_batch(data=IMAGES[:, :100], labels=[0, 1]), r"\(2, 100\)"),
        (_batch(data=IMAGES, labels=[0]), "2 images"),
        (_batch(data=IMAGES, labels=[0, 10]), "a label is 10"),
        (_batch(data=IMAGES, labels=["a", "b"]), "no numbers"),
    ],
)
def test_damaged_batches(tmp_path: Path, content: bytes, words: str) -> None:
    write_cifar(tmp_path, binary=False)
    (tmp_path / "data_batch_2").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"data_batch_2 is no batch of CIFAR-10: .*{words}|data_batch_2 {words}") as caught:
        open_images(f"cifar10:{tmp_path}").read()
    assert caught.value.key == "data.images"


def test_damaged_binary_batches(tmp_path: Path) -> None:
    write_cifar(tmp_path, binary=True)
    path = tmp_path / "data_batch_4.bin"
    whole = path.read_bytes()
    for content, words in ((whole[:-1], "no whole number of records"), (b"", "0 bytes"), (b"\xff" + whole[1:], "a label is 255")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            open_images(f"cifar10:{tmp_path}").read()


def test_wrong_folders(tmp_path: Path) -> None:
    write_cifar(tmp_path / "partly", binary=False, test=False)
    (tmp_path / "partly" / "data_batch_5").unlink()
    (tmp_path / "cifar-10-python.tar.gz").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    for spec, words in [
        (f"cifar10:{tmp_path}/partly", "lacks data_batch_5"),
        (f"cifar10-test:{tmp_path}/partly", "no test_batch"),
        (f"cifar10:{tmp_path}/empty", "cifar-10-binary.tar.gz"),
        (f"cifar10:{tmp_path}/nowhere", "no such folder"),
        (f"cifar10:{tmp_path}/cifar-10-python.tar.gz", "tar xf cifar-10-python.tar.gz"),
        ("cifar10", "Write cifar10:FOLDER"),
        (str(tmp_path / "empty"), f"Write cifar10:{tmp_path}/empty"),
        ("digit", "Did you mean `digits`"),
        ("mnist", "Use digits, cifar10:FOLDER"),
        (str(tmp_path / "none.npz"), "no such file"),
    ]:
        with pytest.raises(ConfigError) as caught:
            open_images(spec)
        assert words in str(caught.value) and caught.value.key == "data.images", str(caught.value)


def test_npz_gives_its_arrays_and_its_size_from_the_header(tmp_path: Path, monkeypatch: Any) -> None:
    path = write_npz(tmp_path / "own.npz", shape=(2, 3, 5), classes=4)
    images, labels = open_images(str(path)).read()
    wanted = draw(120, (2, 3, 5), 4)
    assert np.array_equal(images, wanted[0]) and np.array_equal(labels, wanted[1])
    assert image_size(str(path)) == (30, 4)


X, Y = np.zeros((4, 2, 2)), np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    "arrays, words",
    [
        ({"images": X, "y": Y}, "holds no array x. It holds images, y"),
        ({"x": X}, "holds no array y"),
        ({"x": X, "y": Y[:3]}, "4 images, and y has shape"),
        ({"x": X, "y": Y * 0.5}, "classes are integers"),
        ({"x": X, "y": Y - 1}, "holds -1"),
        ({"x": X, "y": Y * 10**9}, "classes are numbered"),
        ({"x": X, "y": Y * 0}, "nothing to learn"),
        ({"x": X[:0], "y": Y[:0]}, "0 images"),
        ({"x": X[:, 0, 0], "y": Y}, "its first axis counts images"),
        ({"x": X + np.nan, "y": Y}, "not finite"),
        ({"x": X.astype("U3"), "y": Y}, "images are numbers"),
        ({"x": X.astype(object), "y": Y}, "not a readable .npz"),
    ],
)
def test_npz_that_cannot_be_learnt(tmp_path: Path, arrays: Any, words: str) -> None:
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(ConfigError) as caught:
        open_images(str(tmp_path / "own.npz")).read()
    assert words in str(caught.value) and caught.value.exit_code == 2, str(caught.value)


def test_damaged_npz(tmp_path: Path) -> None:
    path = write_npz(tmp_path / "own.npz")
    whole = path.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"PK" + whole[2:200], whole[:150] + b"\0" * 64 + whole[214:]):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="not a readable .npz"):
            open_images(str(path)).read()


def test_paths_become_absolute_and_names_stay(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    assert absolute_images("digits") == "digits" and absolute_images(0.1) == 0.1 and absolute_images("mnist") == "mnist"
    assert absolute_images("cifar10:here") == f"cifar10:{tmp_path}/here"
    assert absolute_images("own.npz") == f"{tmp_path}/own.npz"
