"""Preparations that are killed, run out of room or meet each other: what remains is what an undisturbed one makes."""
from __future__ import annotations

import os
import random
import signal
import sys
import time

import pytest

from ipu_lean.data import prepare
from tests.data.helpers import config, folder_bytes, prose, python

pytestmark = [pytest.mark.pod, pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and limits")]

CODE = """
import os, signal, sys, time
from ipu_lean.data import build, pieces, prepare
from ipu_lean.errors import IpuLeanError
from tests.data.helpers import config
build.GROUP, build.COMMIT_TOKENS = 1, 60_000
(stage_to_die, count), pause = {kill_at}, {pause}
calls = []
def progress(stage, done, total):
    calls.append(stage)
    print(stage, flush=True)
    time.sleep(pause)
    if stage == stage_to_die and calls.count(stage) == count:
        os.kill(os.getpid(), signal.SIGKILL)
{before}
try:
    prepare(config({cache!r}, corpus={corpus!r}, tokenizer={tokenizer!r}), progress)
except IpuLeanError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""

BYTES = {"kind": "bytes"}
PIECES = {"kind": "sentencepiece", "vocab": 200}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "text.txt"
    path.write_bytes(prose(700_000).encode("utf-8"))
    return path


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    """`{kind: (folder name, its content)}`."""
    pytest.importorskip("sentencepiece")
    cache = tmp_path_factory.mktemp("undisturbed")
    found = {}
    for tokenizer in (BYTES, PIECES):
        path = prepare(config(cache, corpus=str(corpus), tokenizer=tokenizer)).path
        found[tokenizer["kind"]] = (path.name, folder_bytes(path))
    return found


def start(tmp_path, corpus, tokenizer, kill_at=("", 0), pause=0.0, before=""):
    settings = {"cache": str(tmp_path / "cache"), "corpus": str(corpus), "tokenizer": tokenizer}
    return python(CODE.format(kill_at=kill_at, pause=pause, before=before, **settings), tmp_path)


def check(tmp_path, expected):
    """The cache holds the expected folder, its lock, and nothing else."""
    name, content = expected
    assert sorted(os.listdir(tmp_path / "cache")) == sorted([name, "locks"])
    assert folder_bytes(tmp_path / "cache" / name) == content


STEPS = [
    (BYTES, ("tokenize", 1)),
    (BYTES, ("tokenize", 5)),
    (BYTES, ("tokenize", 11)),
    (PIECES, ("sample", 4)),
    (PIECES, ("train tokenizer", 1)),
    (PIECES, ("tokenize", 1)),
    (PIECES, ("tokenize", 9)),
]


@pytest.mark.parametrize("tokenizer, kill_at", STEPS)
def test_killed_at_a_step_and_started_again(tmp_path, corpus, undisturbed, tokenizer, kill_at):
    expected = undisturbed[tokenizer["kind"]]
    child = start(tmp_path, corpus, tokenizer, kill_at)
    out, err = child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL, err
    assert not (tmp_path / "cache" / expected[0]).exists()
    child = start(tmp_path, corpus, tokenizer)
    again, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    check(tmp_path, expected)
    if out.split().count("tokenize") > 3:  # something was committed: it is not encoded twice, nor is a tokenizer trained again
        assert "skip" in again and again.split().count("tokenize") < 11 and "train" not in again


def test_killed_again_and_again_at_random_moments(tmp_path, corpus, undisturbed):
    rng, kills = random.Random(0), 0
    while kills < 3:
        child = start(tmp_path, corpus, BYTES, pause=0.02)
        assert child.stdout.readline(), child.stderr.read()
        time.sleep(rng.uniform(0, 0.25))
        child.send_signal(signal.SIGKILL)
        child.communicate(timeout=60)
        kills += 1
    child = start(tmp_path, corpus, BYTES)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    check(tmp_path, undisturbed["bytes"])


EVERY = """
import builtins, os, shutil, signal, sys
from pathlib import Path
from ipu_lean.data import build, prepare
from tests.data.helpers import config, folder_bytes
build.GROUP, build.COMMIT_TOKENS = 1, 200_000
corpus, place = {corpus!r}, Path({place!r})
calls, die_at = [0], None

def deadly(work):
    def call(*args, **settings):
        calls[0] += 1
        if calls[0] == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return work(*args, **settings)
    return call

os.fsync, os.replace, os.rename, os.mkdir, os.unlink = map(deadly, (os.fsync, os.replace, os.rename, os.mkdir, os.unlink))
builtins.open = deadly(open)

def run(cache):
    return prepare(config(cache, corpus=corpus)).path

def forked(cache):
    child = os.fork()
    if child == 0:
        run(cache)
        os._exit(0)
    return os.waitpid(child, 0)[1]

calls[0] = 0
path = run(place / "whole")
total, expected = calls[0], folder_bytes(path)
for point in range(1, total + 1):
    calls[0], die_at = 0, point
    assert forked(place / "cut") == signal.SIGKILL, point
    left = place / "cut" / path.name
    if (left / "manifest.json").exists():
        assert {{**folder_bytes(left), "progress.json": b""}} == {{**expected, "progress.json": b""}}, point
    die_at = None
    assert forked(place / "cut") == 0, point
    found = folder_bytes(left)
    found.pop("progress.json", None)
    assert found == expected, point
    assert sorted(os.listdir(place / "cut")) == sorted(["locks", path.name]), (point, os.listdir(place / "cut"))
    shutil.rmtree(place / "cut")
print(total)
"""


def test_killed_before_each_of_its_changes_to_the_disk(tmp_path, corpus):
    child = python(EVERY.format(corpus=str(corpus), place=str(tmp_path)), tmp_path)
    out, err = child.communicate(timeout=100)
    assert child.returncode == 0, err
    assert int(out) > 20


@pytest.mark.parametrize("damage", ["tokens", "progress", "tokenizer"])
def test_what_a_killed_call_left_is_checked_before_it_is_used(tmp_path, corpus, undisturbed, damage):
    child = start(tmp_path, corpus, PIECES, kill_at=("tokenize", 9))
    child.communicate(timeout=60)
    (work,) = (tmp_path / "cache").glob(".*.part")
    if damage == "tokens":
        with open(work / "tokens.u16", "r+b") as file:
            file.seek(100)
            file.write(b"\xff\xff")
    elif damage == "progress":
        (work / "progress.json").write_text('{"pieces": 3, "tok', encoding="utf-8")
    else:
        (work / "tokenizer" / "sentencepiece.model").write_bytes(b"")
    child = start(tmp_path, corpus, PIECES)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert "skip" not in out
    check(tmp_path, undisturbed["sentencepiece"])


def test_calls_at_the_same_time_share_the_work_of_one(tmp_path, corpus, undisturbed):
    children = [start(tmp_path, corpus, BYTES, pause=0.03) for _ in range(4)]
    outs = []
    for child in children:
        out, err = child.communicate(timeout=60)
        assert child.returncode == 0, err
        outs.append(out.split())
    check(tmp_path, undisturbed["bytes"])
    assert sum("tokenize" in out for out in outs) == 1


LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))"


def test_no_room_is_a_run_error_and_the_next_call_goes_on(tmp_path, corpus, undisturbed):
    child = start(tmp_path, corpus, BYTES, before=LIMIT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 1, err
    assert "No room to write" in err and str(tmp_path / "cache") in err and "bytes are written there" in err
    assert "Traceback" not in err and len(err.strip().splitlines()) == 1
    child = start(tmp_path, corpus, BYTES)
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    assert "skip" in out
    check(tmp_path, undisturbed["bytes"])
