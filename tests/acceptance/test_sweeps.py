"""Sweeps that take long: killed again and again, and as a job array."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ipu_lean.config import dump_config
from tests.sweep.helpers import tiny
from tests.sweep.test_going_on import check_kills_lose_nothing
from tests.sweep.test_slurm import ROOT, SCRIPT

pytestmark = pytest.mark.pod
SBATCH = """#!/usr/bin/env bash
# Notes the arguments and runs the wrapped command for each task of the array; the first task is lost.
echo "$@" >>"$LOG"
for word in "$@"; do case $word in --array=*) last=${word##*-} ;; esac; done
if [ -n "${last:-}" ]; then
    for task in $(seq 1 "$last"); do SLURM_ARRAY_TASK_ID=$task SLURM_CPUS_PER_TASK=1 bash -c "${@: -1}" >/dev/null 2>&1; done
    echo "77;cluster"
else
    SLURM_CPUS_PER_TASK=1 bash -c "${@: -1}" >&2
    echo 78
fi
"""


def test_shares_run_as_an_array_and_the_last_job_makes_up_for_a_lost_one(tmp_path):
    (tmp_path / "tiny.yaml").write_text(dump_config(tiny(tmp_path)))
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "sbatch").write_text(SBATCH)
    (tools / "sbatch").chmod(0o755)
    environ = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT),
               "OMP_NUM_THREADS": "1", "LOG": str(tmp_path / "log"), "SBATCH_OPTIONS": "--partition=cpu --time=1:00"}
    flags = ["--lrs", "2^-9..2^-6", "--executor", "sequential"]
    command = ["bash", str(SCRIPT), "2", str(tmp_path / "out dir"), str(tmp_path / "tiny.yaml"), *flags]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    array, judge = (tmp_path / "log").read_text().splitlines()
    assert "--array=0-1 --partition=cpu --time=1:00 --wrap" in array and "--dependency=afterany:77 " in judge
    summary = json.loads((tmp_path / "out dir" / "summary.json").read_text())
    assert summary["metrics"]["counts"]["done"] == 4
    stamps = sorted((path.stat().st_mtime_ns, path) for path in (tmp_path / "out dir" / "trials").iterdir())
    early = {json.loads(path.read_text())["axes"]["lr"] for _, path in stamps[:2]}
    assert early == {2.0**-8, 2.0**-6}  # the second task's share; the last job ran the other two


def test_six_kills(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(dump_config(tiny(tmp_path)))
    check_kills_lose_nothing(capsys, str(tmp_path / "tiny.yaml"), kills=6)
    assert (tmp_path / "out" / "results.csv").exists()
