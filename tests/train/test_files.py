"""Atomic files and what a full disk looks like."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ipu_lean.errors import EnvironmentProblem, RunError
from ipu_lean.train import files

pytestmark = pytest.mark.pod


def test_write_atomic_replaces_or_leaves_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "note"
    files.write_atomic(path, "old")
    files.write_atomic(path, "new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["note"]

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="the disk is full"):
        files.write_atomic(path, "newer")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["note"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_disk_guard_knows_full_disks_and_libraries_words_for_them(number: int) -> None:
    words = (f"I/O error: something (os error {number})", f"IoError(Os {{ code: {number}, kind: Other }})")
    for error in (OSError(number, os.strerror(number)), *map(RuntimeError, words)):
        with pytest.raises(RunError, match="was not written"), files.disk_guard("x was not written"):
            raise error


def test_disk_guard_lets_the_rest_through() -> None:
    with pytest.raises(EnvironmentProblem, match="no permission"), files.disk_guard("x was not written"):
        raise OSError(errno.EROFS, "Read-only file system")
    with pytest.raises(ValueError), files.disk_guard("x was not written"):
        raise ValueError("os error 5")
    with pytest.raises(RunError, match="^mine$"), files.disk_guard("x was not written"):
        raise RunError("mine")


def test_json_keeps_every_digit(tmp_path: Path) -> None:
    value = {"x": 0.1 + 0.2, "y": [1e-300, None, True]}
    files.write_json(tmp_path / "a.json", value)
    assert files.read_json(tmp_path / "a.json") == value
    (tmp_path / "a.json").write_text('{"x": 1')
    assert files.read_json(tmp_path / "a.json") is None and files.read_json(tmp_path / "b.json") is None


def test_sha256_and_remove_tree(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert files.sha256(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    files.remove_tree(tmp_path / "tree")
    files.remove_tree(tmp_path / "not there")
    assert os.listdir(tmp_path) == ["abc"]
