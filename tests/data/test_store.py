"""Writing whole, locking, and the system's errors."""
from __future__ import annotations

import errno
import hashlib
import os
import signal
import sys

import numpy as np
import pytest

from ipu_lean.data import store
from ipu_lean.errors import EnvironmentProblem, RunError
from tests.data.helpers import ROOT, python

pytestmark = pytest.mark.pod

U16 = np.dtype("<u2")


def test_the_cache_s_place(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("IPU_LEAN_CACHE", raising=False)
    assert str(store.cache_folder(None)) == "/home/me/.cache/ipu_lean"
    monkeypatch.setenv("IPU_LEAN_CACHE", "~/tokens")
    assert str(store.cache_folder(None)) == "/home/me/tokens"
    assert str(store.cache_folder("here")) == "here"


def test_a_writer_continues_from_a_commit_and_forgets_what_came_after(tmp_path):
    path = tmp_path / "tokens.u16"
    ids = np.arange(1000, dtype=np.int64) * 60
    writer = store.TokenWriter(path, U16)
    writer.write(ids[:600])
    state = writer.commit()
    writer.write(ids)
    writer.commit()
    writer.close()
    again = store.TokenWriter(path, U16, state)
    again.write(ids[600:])
    end = again.commit()
    again.close()
    whole = ids.astype(U16).tobytes()
    assert path.read_bytes() == whole
    assert end == {"tokens": 1000, "sha256": hashlib.sha256(whole).hexdigest()}


@pytest.mark.parametrize("damage", ["flip", "short"])
def test_a_file_that_does_not_begin_with_what_was_committed_is_refused(tmp_path, damage):
    path = tmp_path / "tokens.u16"
    writer = store.TokenWriter(path, U16)
    writer.write(np.arange(1000))
    state = writer.commit()
    writer.close()
    content = path.read_bytes()
    path.write_bytes(content[:500] + b"\xff" + content[501:] if damage == "flip" else content[:-2])
    with pytest.raises(ValueError, match="1000 tokens"):
        store.TokenWriter(path, U16, state)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_is_a_run_error_with_place_and_bytes(tmp_path):
    (tmp_path / "other").write_bytes(b"x" * 1234)
    os.symlink("/dev/full", tmp_path / "tokens.u16")
    with pytest.raises(RunError, match="No space left on device") as caught, store.disk_errors(tmp_path):
        writer = store.TokenWriter(tmp_path / "tokens.u16", U16)
        try:
            writer.write(np.arange(1000))
            writer.commit()
        finally:
            writer.close()
    assert str(tmp_path) in str(caught.value) and "1,234 bytes are written there" in str(caught.value)


def test_other_errors_of_the_system(tmp_path):
    with pytest.raises(
        EnvironmentProblem, match="cannot be written to /somewhere: Permission denied. Set data.cache"
    ), store.disk_errors(tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied", "/somewhere")
    with pytest.raises(BrokenPipeError), store.disk_errors(tmp_path):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_small_files_are_replaced_and_nothing_is_left_beside(tmp_path):
    store.write_whole(tmp_path / "a.json", "{}")
    store.write_whole(tmp_path / "a.json", '{"é": 1}')
    assert store.read_json(tmp_path / "a.json") == {"é": 1}
    assert os.listdir(tmp_path) == ["a.json"]
    for wrong in (b"", b'{"a": ', b"[1]", b"\xff"):
        (tmp_path / "b.json").write_bytes(wrong)
        assert store.read_json(tmp_path / "b.json") is None
    assert store.read_json(tmp_path / "absent.json") is None


def test_publishing_replaces_what_was_there(tmp_path):
    for name in ("work", "final"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "content").write_text(name, encoding="utf-8")
    (tmp_path / "final" / "extra").write_text("old", encoding="utf-8")
    (tmp_path / ".final.77.old").mkdir()  # from a call that was killed while it removed the old folder
    store.publish(tmp_path / "work", tmp_path / "final")
    assert os.listdir(tmp_path) == ["final"] and os.listdir(tmp_path / "final") == ["content"]
    assert (tmp_path / "final" / "content").read_text(encoding="utf-8") == "work"


def test_publishing_gives_way_to_one_who_was_faster(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    real = os.rename

    def rename(source, target):
        if source == tmp_path / "final":
            raise FileNotFoundError(errno.ENOENT, "another process has moved it")
        (tmp_path / "final").mkdir()
        (tmp_path / "final" / "content").write_text("theirs", encoding="utf-8")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    store.publish(tmp_path / "work", tmp_path / "final")
    assert os.listdir(tmp_path) == ["final"] and os.listdir(tmp_path / "final") == ["content"]


HOLD = """
import sys, time
from pathlib import Path
from ipu_lean.data.store import exclusive
with exclusive(Path("locks/a.lock"), lambda: None) as locked:
    print(locked, flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fcntl")
def test_a_lock_is_waited_for_and_falls_free_when_its_holder_is_killed(tmp_path):
    holder = python(HOLD, tmp_path)
    assert holder.stdout.readline() == "True\n", holder.stderr.read()
    waits = []

    def waiting():
        waits.append(1)
        if len(waits) == 3:
            os.kill(holder.pid, signal.SIGKILL)
            holder.communicate()

    with store.exclusive(tmp_path / "locks" / "a.lock", waiting) as locked:
        assert locked
    assert len(waits) >= 3


def test_where_there_are_no_locks_the_caller_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "fcntl", None)
    with store.exclusive(tmp_path / "a.lock", lambda: None) as locked:
        assert not locked


def test_nothing_heavy_is_imported(tmp_path):
    heavy = "torch lightning pytorch_lightning sentencepiece tokenizers datasets"
    code = f"import sys, ipu_lean.data\nprint(set({heavy!r}.split()) & set(sys.modules))"
    out, err = python(code, ROOT).communicate(timeout=60)
    assert out == "set()\n", err
