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
