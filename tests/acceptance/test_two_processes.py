"""Two processes that were stopped go on to the last bit; a world of one goes on from two, and two from one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.train.helpers import write_yaml
from tests.train.test_lit import NO_DROPOUT, ROOT, TORCHRUN, assert_same_run, launch, weights_of

pytestmark = pytest.mark.pod


@pytest.mark.parametrize("runner, words", [((), ["train.processes=2"]), (TORCHRUN, [])], ids=["lightning", "torchrun"])
def test_two_processes_go_on(tmp_path: Path, runner: Any, words: Any) -> None:
    dropout = {**NO_DROPOUT, "model": {"dropout": 0.2}}
    config = write_yaml(tmp_path, **dropout)
    run = tmp_path / "run"
    assert launch(["train", config, *words, "--out", run], tmp_path, runner).returncode == 0
    (run / "checkpoints" / "step-00000012").rename(tmp_path / "straight")
    ended = launch(["resume", run], tmp_path, runner)
    assert ended.returncode == 0 and "going on from step-00000009" in ended.stdout, ended.stderr
    for name in ("model.safetensors", "optimizer.pt", "trainer.json"):
        assert (run / "checkpoints" / "step-00000012" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes(), name


def test_from_one_process_to_two(zygote: Any, tmp_path: Path) -> None:
    config = write_yaml(tmp_path, **NO_DROPOUT)
    reference = tmp_path / "one"
    assert zygote.run(["train", config, "--out", reference]).code == 0
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    ended = launch(["resume", run, "train.processes=2"], tmp_path)
    assert ended.returncode == 0 and "going on from step-00000009" in ended.stdout, ended.stderr
    assert_same_run(run, reference)
    assert weights_of(run).keys() == weights_of(reference).keys()


def test_ctrl_c_stops_both_at_the_same_step(tmp_path: Path) -> None:
    """As a terminal does it: the signal goes to every process of the group."""
    config = write_yaml(tmp_path, **{**NO_DROPOUT, "train": {"steps": 100000, "eval_every": 0, "save_every": 100000}})
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ipu_lean", "train", str(config), "train.processes=2", "--out", str(tmp_path / "run")]
    running = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while running.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.1)
    os.killpg(running.pid, signal.SIGINT)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 130 and "and saved" in err and "Traceback" not in err, err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted" and summary["steps"] > 0
    assert (tmp_path / "run" / "checkpoints" / f"step-{summary['steps']:08d}").is_dir()
