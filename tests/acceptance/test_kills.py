"""Twenty runs killed at random moments, most of them more than once, end in the bytes of a run that nobody killed."""

from __future__ import annotations

import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.train.helpers import write_yaml
from tests.train.test_resume import assert_readable, assert_same_end

pytestmark = pytest.mark.pod
# Evaluations, best checkpoints, dropout and shared state all matter; both sampler epochs are crossed.
CHANGES = {
    "model": {"dropout": 0.2, "attention_dropout": 0.1},
    "train": {"steps": 12, "save_every": 2, "eval_every": 3, "keep_last": 2},
}


@pytest.fixture(scope="module")
def whole(zygote: Any, tmp_path_factory: Any) -> Any:
    """(folder, uninterrupted run, its file operations, its seconds), with the corpus prepared beforehand."""
    folder = tmp_path_factory.mktemp("whole")
    config = write_yaml(folder, **CHANGES)
    assert zygote.run(["prepare", config]).code == 0
    started = time.perf_counter()
    ended = zygote.run(["train", config, "--out", folder / "run"])
    assert ended.code == 0, ended.err
    return folder, folder / "run", ended.operations, time.perf_counter() - started


@pytest.mark.parametrize("seed", range(20))
def test_random_kills(zygote: Any, whole: Any, tmp_path: Path, seed: int) -> None:
    folder, reference, operations, seconds = whole
    draw, run, kills = random.Random(seed), tmp_path / "run", 0
    for attempt in range(8):
        words = ["resume", run] if run.exists() else ["train", folder / "tiny.yaml", "--out", run]
        moment = (
            {"kill_at": draw.randint(1, int(0.8 * operations))} if seed % 2 else {"kill_after": draw.uniform(0.05, 0.8 * seconds)}
        )
        ended = zygote.run(words, **({} if attempt == 7 else moment))
        assert ended.code in (0, -signal.SIGKILL), ended.err
        if run.exists():
            assert_readable(run)
        if ended.code == 0 and kills:
            break
        if ended.code == 0:  # the machine is faster now than when `seconds` was taken: begin again, and sooner
            shutil.rmtree(run)
            seconds /= 2
        else:
            kills += 1
    assert ended.code == 0 and kills > 0
    assert_same_end(run, reference)
    print(f"seed {seed}: {kills} kills")
