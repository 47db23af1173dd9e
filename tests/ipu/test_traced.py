"""The plan from formulas beside the plan from the traced step."""

from __future__ import annotations

import glob
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from ipu_lean.cli import main
from ipu_lean.config import load_config
from ipu_lean.errors import ConfigError, RunError
from ipu_lean.ipu.emulator.checks import Violation
from ipu_lean.ipu.emulator.examine import Report
from ipu_lean.ipu.plan import make_plan
from ipu_lean.ipu.plan.network import as_ipu, workload_of
from ipu_lean.ipu.traced import _accepted, compare, traced_plan
from tests.ipu.helpers import ipu_config
from tests.ipu.plan.placements import random_config

pytestmark = pytest.mark.pod
ROOT = Path(__file__).parents[2]
FILES = sorted(glob.glob(str(ROOT / "configs" / "*.yaml")))


@pytest.mark.parametrize("path", FILES, ids=os.path.basename)
def test_both_estimates_agree_on_every_ipu(path: str) -> None:
    config, _ = as_ipu(load_config(path))
    plan = make_plan(workload_of(config))
    seen = traced_plan(plan, config)
    for row in compare(plan, seen):
        assert abs(row["difference"]) <= 0.15, row
    assert seen.verdict == plan.verdict


@pytest.mark.parametrize("seed", range(4))
def test_weights_gradients_and_state_are_equal(seed: int) -> None:
    """Whatever the model and its placement: these depend on parameters alone."""
    config = random_config(random.Random(seed))
    plan = make_plan(workload_of(config))
    for mine, theirs in zip(plan.ipus, traced_plan(plan, config).ipus):
        for item in ("weights", "accumulators", "state"):
            assert mine.items[item] == theirs.items[item]


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("kind", ["reversible", "residual"])
def test_stashes_are_equal_to_the_byte(kind: str, every: bool) -> None:
    """Four layers on two IPUs, and the readout on the first again: the second keeps 3 micro-batches."""
    stack = {"kind": kind, "output": "sum"} if kind == "reversible" else {"kind": kind}
    config = ipu_config(model={"stack": stack}, ipu={"recompute_checkpoint_every_layer": every})
    plan = make_plan(workload_of(config))
    mine, theirs = plan.ipus[1].items["stash"], traced_plan(plan, config).ipus[1].items["stash"]
    streams, each = (2 if kind == "reversible" else 1), 2 * 8 * 16 * 4
    assert mine == theirs == 3 * each * streams * (3 if every else 1)


def test_a_longer_row_is_seen_by_both() -> None:
    for scale in (1, 4):
        config = ipu_config(model={"seq": 64 * scale, "width": 64, "heads": 4})
        plan = make_plan(workload_of(config))
        assert all(abs(row["difference"]) <= 0.15 for row in compare(plan, traced_plan(plan, config)))


def test_the_command_prints_both_and_their_difference(capsys: Any) -> None:
    assert main(["plan", str(ROOT / "configs" / "tiny_ipu.yaml"), "--traced", "--json"]) == 0
    *table, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)["metrics"]["traced"]["ipus"]
    assert [row["ipu"] for row in rows] == [0, 1]
    assert f"{100 * rows[0]['difference']:+.1f} %" in table[-3] and table[-1] == "verdict of the traced step: fits"


def test_a_step_that_cannot_be_traced_is_said() -> None:
    report = Report([Violation("op", "aten::erfinv has no handler")], [], [], {}, 0, 0, None)
    with pytest.raises(RunError, match="cannot be traced: aten::erfinv has no handler. `ipu-lean check` says more"):
        _accepted(report)


def test_a_surrogate_is_traced_too() -> None:
    """Nothing is recomputed: the forward pass at its fullest and the gradients are what it holds."""
    config = ipu_config(ipu={"layers_per_ipu": [4]}, memory={"ipu_backward": "surrogate"})
    plan = make_plan(workload_of(config))
    (mine,), (theirs,) = plan.ipus, traced_plan(plan, config).ipus
    assert theirs.items["weights"] == mine.items["weights"]
    assert theirs.items["live"] >= 4 * 4 * 12 * 16 * 16  # the gradients of the layers
    assert abs(theirs.before - mine.before) <= 0.15 * mine.before
    two = ipu_config(ipu={"layers_per_ipu": [2, 2], "execution": "sharded"}, memory={"ipu_backward": "surrogate"})
    with pytest.raises(ConfigError, match="visits each twice"):
        traced_plan(make_plan(workload_of(two)), two)
