"""Killed anywhere, a run goes on to the same last bit, and its directory can always be read."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from ipu_lean.train.checkpoint import CheckpointStore
from ipu_lean.train.snapshot import damage
from tests.train.helpers import timeless, write_yaml

pytestmark = pytest.mark.pod
STEPS = 12
FINAL = f"checkpoints/step-{STEPS:08d}"


@pytest.fixture(scope="module")
def whole(zygote: Any, tmp_path_factory: Any) -> Any:
    """(folder with tiny.yaml, run directory of an uninterrupted run, its file operations)."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_yaml(folder)
    ended = zygote.run(["train", config, "--out", folder / "run"])
    assert ended.code == 0, ended.err
    return folder, folder / "run", ended.operations


def assert_same_end(run: Path, reference: Path) -> None:
    """Weights, optimizer, position, random state and metrics, as an uninterrupted run has them."""
    for name in ("model.safetensors", "optimizer.pt", "trainer.json", "roles.json"):
        assert (run / FINAL / name).read_bytes() == (reference / FINAL / name).read_bytes(), name
    assert timeless(run / "metrics.jsonl") == timeless(reference / "metrics.jsonl")
    assert json.loads((run / "summary.json").read_text())["status"] == "ok"
    assert (run / "metrics.csv").read_text().count("\n") == len(timeless(run / "metrics.jsonl")) + 1


def assert_readable(run: Path) -> None:
    """Every directory with a checkpoint's name is a whole checkpoint, and one is found if there is any."""
    store = CheckpointStore(run / "checkpoints")
    for step in store.steps():
        assert damage(store.path(step)) is None, f"step {step}"
    assert (store.latest() is not None) == bool(store.steps())
    assert (run / "config.yaml").read_text()


@pytest.mark.parametrize("share", [0.05, 0.45, 0.8])
def test_killed_at_a_file_operation(zygote: Any, whole: Any, tmp_path: Path, share: float) -> None:
    folder, reference, operations = whole
    run = tmp_path / "run"
    # The corpus is prepared by now, so a second run has fewer operations; the share is taken of what it has left.
    number = max(1, int(share * (operations - 12)))
    ended = zygote.run(["train", folder / "tiny.yaml", "--out", run], kill_at=number)
    assert ended.code == -signal.SIGKILL
    if not run.exists():  # died before the run directory got its name: nothing to resume, nothing in the way
        assert zygote.run(["train", folder / "tiny.yaml", "--out", run]).code == 0
    else:
        assert_readable(run)
        ended = zygote.run(["resume", run])
        assert ended.code == 0, ended.err
    assert_same_end(run, reference)


def test_killed_twice_while_writing_a_checkpoint(zygote: Any, whole: Any, tmp_path: Path) -> None:
    folder, reference, _ = whole
    run = tmp_path / "run"
    prelude = (
        "import os, signal, itertools\n"
        "from ipu_lean.train import snapshot\n"
        "count = itertools.count(1)\n"
        "whole = snapshot.fsync_file\n"
        "def half(path):\n"
        "    if next(count) == 9:\n"
        "        open(path, 'r+b').truncate(10)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    whole(path)\n"
        "snapshot.fsync_file = half\n"
    )
    assert zygote.run(["train", folder / "tiny.yaml", "--out", run], prelude=prelude).code == -signal.SIGKILL
    left = [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".tmp-")]
    assert len(left) == 1, "a half-written checkpoint was to be left behind"
    assert_readable(run)
    assert zygote.run(["resume", run], prelude=prelude).code == -signal.SIGKILL
    assert_readable(run)
    assert zygote.run(["resume", run]).code == 0
    assert not list((run / "checkpoints").glob(".*")), "leftovers are cleaned"
    assert_same_end(run, reference)


def test_killed_before_the_first_checkpoint(zygote: Any, whole: Any, tmp_path: Path) -> None:
    folder, reference, _ = whole
    run = tmp_path / "run"
    prelude = "import os\nfrom ipu_lean.train.loop import TrainLoop\nTrainLoop.save = lambda self: os.kill(os.getpid(), 9)\n"
    assert zygote.run(["train", folder / "tiny.yaml", "--out", run], prelude=prelude).code == -signal.SIGKILL
    assert len(timeless(run / "metrics.jsonl")) > 0
    ended = zygote.run(["resume", run])
    assert ended.code == 0, ended.err
    assert_same_end(run, reference)


def test_damaged_newest_checkpoint_is_put_aside(zygote: Any, whole: Any, tmp_path: Path) -> None:
    folder, reference, _ = whole
    run = tmp_path / "run"
    prelude = (
        "import os\nfrom ipu_lean.train.loop import TrainLoop\nold = TrainLoop.advance\n"
        "def advance(self):\n    result = old(self)\n    if self.step == 7: os.kill(os.getpid(), 9)\n    return result\n"
        "TrainLoop.advance = advance\n"
    )
    assert zygote.run(["train", folder / "tiny.yaml", "--out", run], prelude=prelude).code == -signal.SIGKILL
    newest = run / "checkpoints" / "step-00000006"
    with open(newest / "optimizer.pt", "r+b") as file:
        file.seek(200)
        file.write(b"\0\1\2\3")
    ended = zygote.run(["resume", run])
    assert ended.code == 0, ended.err
    assert "step-00000006 is damaged (optimizer.pt differs from its checksum)" in ended.err
    assert "going on from step-00000004" in ended.out
    assert (run / "checkpoints" / "damaged-step-00000006").is_dir()
    assert_same_end(run, reference)


def test_longer_run_keeps_its_beginning(zygote: Any, whole: Any, tmp_path: Path) -> None:
    folder, reference, _ = whole
    run = tmp_path / "run"
    assert zygote.run(["train", folder / "tiny.yaml", "--out", run]).code == 0
    ended = zygote.run(["resume", run, "train.steps=18", "train.save_every=6", "--json"])
    assert ended.code == 0, ended.err
    assert ended.summary["steps"] == 18
    first = timeless(reference / "metrics.jsonl")
    assert timeless(run / "metrics.jsonl")[: len(first)] == first
    rates = [record["lr"] for record in timeless(run / "metrics.jsonl") if record["split"] == "train" and record["step"] > STEPS]
    assert len(rates) == 3 and all(abs(rate - 3e-4) < 1e-9 for rate in rates), "the schedule's horizon stays where it was"
    straight = tmp_path / "straight"
    assert zygote.run(["train", folder / "tiny.yaml", "train.steps=18", f"schedule.steps={STEPS}", "--out", straight]).code == 0
    last = "checkpoints/step-00000018/model.safetensors"
    assert (run / last).read_bytes() == (straight / last).read_bytes()


def test_refusals(zygote: Any, whole: Any, tmp_path: Path) -> None:
    _, run, _ = whole
    for override, word in (
        ("optimizer.lr=1e-3", "optimizer.lr"),
        ("train.steps=5", "train.steps"),
        ("model.depth=4", "model.depth"),
    ):
        ended = zygote.run(["resume", run, override])
        assert ended.code == 2 and word in ended.err and "Traceback" not in ended.err, ended.err
    edited = tmp_path / "edited"
    assert zygote.run(["train", run.parent / "tiny.yaml", "--out", edited]).code == 0
    text = (edited / "config.yaml").read_text()
    assert "lr: 0.003" in text
    (edited / "config.yaml").write_text(text.replace("lr: 0.003", "lr: 0.001"))
    before = (edited / "config.yaml").read_bytes()
    ended = zygote.run(["resume", edited, f"train.steps={STEPS + 6}"])
    assert (edited / "config.yaml").read_bytes() == before, "a refused resume has changed the run"
    assert ended.code == 2 and "config.yaml was edited" in ended.err and "optimizer.lr" in ended.err


def test_another_release_is_mentioned(zygote: Any, whole: Any) -> None:
    _, run, _ = whole
    prelude = "import ipu_lean\nipu_lean.__version__ = '9.9'\n"
    ended = zygote.run(["resume", run], prelude=prelude)
    assert ended.code == 0 and "this is ipu_lean 9.9" in ended.err and "not bit for bit" in ended.err


def test_finished_run_resumes_to_itself(zygote: Any, whole: Any) -> None:
    _, run, _ = whole
    before = timeless(run / "metrics.jsonl")
    ended = zygote.run(["resume", run, "--json"])
    assert ended.code == 0 and ended.summary["status"] == "ok" and ended.summary["steps"] == STEPS
    assert timeless(run / "metrics.jsonl") == before


def test_a_second_process_is_kept_out(zygote: Any, whole: Any) -> None:
    import fcntl

    _, run, _ = whole
    with open(run / ".lock", "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        ended = zygote.run(["resume", run])
    assert ended.code == 1 and "another process is training" in ended.err


def test_source_text_may_be_gone(zygote: Any, tmp_path: Path) -> None:
    config = write_yaml(tmp_path)
    run = tmp_path / "run"
    prelude = (
        "import os\nfrom ipu_lean.train.loop import TrainLoop\nold = TrainLoop.advance\n"
        "def advance(self):\n    result = old(self)\n    if self.step == 5: os.kill(os.getpid(), 9)\n    return result\n"
        "TrainLoop.advance = advance\n"
    )
    assert zygote.run(["train", config, "--out", run], prelude=prelude).code == -signal.SIGKILL
    text = (tmp_path / "corpus.txt").read_text()
    (tmp_path / "corpus.txt").unlink()
    assert zygote.run(["resume", run]).code == 0
    # With its tokens gone too, another text under the same name is noticed.
    (run / "checkpoints").rename(tmp_path / "checkpoints")
    (tmp_path / "corpus.txt").write_text(text.replace("lean", "stout"))
    (tmp_path / "cache").rename(tmp_path / "gone")
    ended = zygote.run(["resume", run])
    assert ended.code == 1 and "the training text has changed" in ended.err
