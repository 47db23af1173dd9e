"""Filling a POD, and the command lines that start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ipu_lean.errors import ConfigError
from ipu_lean.ipu.pod import fill
from tests.ipu.helpers import ipu_config

pytestmark = pytest.mark.pod

SCRIPTS = Path(__file__).parents[2] / "scripts"
CONFIG = """
mup: {base_width: 32}
model: {width: 32, depth: 4, seq: 16}
batch: {micro: 2, accumulation: 144}
ipu: {layers_per_ipu: [0, 1, 1, 2]}
"""


def test_replicas_fill_the_pod_and_the_global_batch_stays() -> None:
    config = ipu_config(batch={"accumulation": 40})
    for ipus in (2, 4, 8, 16):
        found = fill(config, ipus)
        assert found.replicas * found.ipus_per_replica == ipus
        assert found.replicas * found.accumulation == 40


@pytest.mark.parametrize("ipus, accumulation, message", [(16, 32, "leave 4 each.*at least 5.*Use 40"), (8, 30, "leave 7.5 each")])
def test_a_batch_that_is_too_small_or_uneven(ipus: int, accumulation: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fill(ipu_config(batch={"accumulation": accumulation}), ipus)


def test_a_replica_must_fit() -> None:
    with pytest.raises(ConfigError, match="a replica takes 2 IPUs, and 3"):
        fill(ipu_config(), 3)


def run(tmp_path: Path, script: str, *words: str, **environment: str) -> Any:
    (tmp_path / "run.yaml").write_text(CONFIG)
    own = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(SCRIPTS.parent), **environment}
    return subprocess.run(
        ["bash", str(SCRIPTS / script), str(tmp_path / "run.yaml"), *words], capture_output=True, text=True, env=own
    )


def test_one_host_is_an_ordinary_process(tmp_path: Path) -> None:
    done = run(tmp_path, "pod16.sh", "seed=3", "--out", "there", DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    first, command = done.stdout.splitlines()
    assert first == "16 IPUs: 4 replicas of 4, accumulation 36"
    words = command.split()
    assert words[0] == sys.executable and "poprun" not in command
    assert words[-6:] == ["device=ipu", "seed=3", "batch.replicas=4", "batch.accumulation=36", "--out", "there"]


def test_several_hosts_are_started_by_poprun(tmp_path: Path) -> None:
    (tmp_path / "poprun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "poprun").chmod(0o755)
    done = run(
        tmp_path, "pod64.sh", "ipu.executable_cache=/shared/cache", PATH=f"{tmp_path}:{os.environ['PATH']}",
        HOSTS_LIST="a,b,c,d", VIPU_PARTITION="p", VIPU_SERVER="v",
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()[1:]
    pairs = dict(zip(words[:16:2], words[1:16:2]))
    assert pairs == {
        "--num-instances": "4", "--num-replicas": "16", "--ipus-per-replica": "4", "--host": "a,b,c,d",
        "--vipu-partition": "p", "--vipu-server-host": "v", "--executable-cache-path": "/shared/cache", sys.executable: "-m",
    }
    assert "batch.replicas=16" in words and "batch.accumulation=9" in words


def test_mistakes_end_before_anything_is_started(tmp_path: Path) -> None:
    done = run(tmp_path, "pod16.sh", "batch.accumulation=9")
    assert done.returncode == 2 and "leave 2.25 each" in done.stderr and done.stdout == ""
    done = run(tmp_path, "pod64.sh", "batch.accumulation=144", VIPU_PARTITION="p", VIPU_SERVER="v")
    assert done.returncode != 0 and "HOSTS_LIST" in done.stderr
