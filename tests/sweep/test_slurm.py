"""The job array's commands; tests/acceptance/test_sweeps.py runs them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.pod
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "slurm_sweep.sh"


def test_a_dry_run_submits_nothing(tmp_path):
    environ = {**os.environ, "DRY_RUN": "1", "PYTHON": "python3"}
    done = subprocess.run(["bash", str(SCRIPT), "3", "out"], env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--array=0-2" in done.stderr and "SLURM_ARRAY_TASK_ID/3" in done.stderr
    assert subprocess.run(["bash", str(SCRIPT), "3"], capture_output=True).returncode == 2


def dry(tmp_path, *arguments):
    """(exit code, what it would have done or says)."""
    environ = {**os.environ, "DRY_RUN": "1", "PYTHON": "python3"}
    command = ["bash", str(SCRIPT), *arguments]
    done = subprocess.run(command, env=environ, cwd=str(tmp_path), capture_output=True, text=True, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.parametrize("tasks", ["out", "0", "-1", "2.5", ""])
def test_a_number_of_tasks_that_is_none_is_told_before_anything_is_done(tmp_path, tasks):
    code, told = dry(tmp_path, tasks, "16", "tiny.yaml", "--lrs", "1,2")
    assert code == 2 and "TASKS must be a whole number" in told and "ipu_lean" not in told


def test_axes_without_a_configuration_make_a_sweep_larger(tmp_path):
    code, told = dry(tmp_path, "4", "out dir", "--lrs", "2^-4")
    assert code == 0 and r"-m ipu_lean sweep out\ dir --lrs 2\^-4 --plan" in told and "--array=0-3" in told
    code, told = dry(tmp_path, "4", "out", "tiny.yaml", "--lrs", "2^-4")
    assert code == 0 and r"-m ipu_lean sweep tiny.yaml --lrs 2\^-4 --out out --plan" in told
