"""What the command says of trials whose losses are known."""

from __future__ import annotations

import json

import pytest

from ipu_lean.config import load_config
from ipu_lean.sweep.grid import expand
from ipu_lean.sweep.results import Store
from ipu_lean.sweep.trial import make_result
from tests.sweep.commandline import WIDE, moving, planned, sweep, table
from tests.sweep.helpers import fill

pytestmark = pytest.mark.pod


def test_a_learning_rate_that_transfers_passes_beside_one_that_does_not(capsys, yaml):
    run = planned(capsys, yaml, *WIDE)
    fill(run, moving())
    code, summary, out, err = sweep(capsys, run)
    assert (code, summary["verdict"]) == (0, "pass") and "error" not in err
    mup, standard = summary["metrics"]["groups"]
    assert mup["slope"] == pytest.approx(0.0, abs=0.02) and standard["slope"] == pytest.approx(-1.0, abs=0.02)
    assert (mup["verdict"], standard["verdict"]) == ("pass", "fail")
    assert mup["optima"][0]["log2_lr"] == pytest.approx(-7.2, abs=0.02) and mup["optima"][0]["best_lr"] == 2.0**-7


def test_a_learning_rate_that_moves_fails_with_four(capsys, yaml):
    run = planned(capsys, yaml, *WIDE)
    fill(run, moving(mup=-1.0))
    code, summary, out, err = sweep(capsys, run)
    assert (code, summary["verdict"], summary["exit_code"]) == (4, "fail", 4)
    assert "does not transfer" in summary["error"] and "ipu-lean: error: the optimum moves by -1.00" in err
    assert json.loads((run / "summary.json").read_text())["verdict"] == "fail" and (run / "transfer.png").exists()


def test_without_contrast_nothing_passes_and_strict_is_strict(capsys, yaml):
    run = planned(capsys, yaml, *WIDE)
    fill(run, moving(standard=0.0))
    code, summary, _, err = sweep(capsys, run)
    assert (code, summary["verdict"]) == (0, "inconclusive") and "no contrast" in err
    code, summary, _, err = sweep(capsys, run, "--strict")
    assert (code, summary["verdict"]) == (4, "inconclusive") and "ipu-lean: error:" in err


def test_depth_has_a_verdict_of_its_own(capsys, yaml):
    run = planned(capsys, yaml, "--depths", "2..8", "--lrs", "2^-10..2^-4", "--seeds", "2")
    fill(run, moving())
    _, summary, out, _ = sweep(capsys, run)
    (group,) = summary["metrics"]["groups"]
    assert group["axis"] == "depth" and [one["depth"] for one in group["optima"]] == [2, 4, 8]
    assert "per doubling of depth" in out


def test_other_axes_are_judged_apart(capsys, yaml):
    run = planned(capsys, yaml, *WIDE[:-2], "optimizer.weight_decay=[0,0.1]")
    fill(run, moving())
    _, summary, out, _ = sweep(capsys, run)
    assert [group["cell"] for group in summary["metrics"]["groups"]] == [
        {"optimizer.weight_decay": 0}, {"optimizer.weight_decay": 0.1}]
    assert "mup, optimizer.weight_decay 0.1:" in out


def test_diverged_and_failed_trials_are_recorded_and_not_fatal(capsys, yaml):
    run = planned(capsys, yaml, *WIDE)
    fill(run, moving())
    config, store = load_config(run), Store(run)
    trials = expand(config, config.sweep)
    store.add(make_result(trials[13], [5.0, float("nan")], seconds=0.1, executor="local"))
    store.add(make_result(trials[0], [], seconds=0.1, executor="local", status="failed", error="out of, memory"))
    code, summary, out, _ = sweep(capsys, run)
    counts = summary["metrics"]["counts"]
    assert (counts["diverged"], counts["failed"], counts["done"]) == (1, 1, len(trials) - 2)
    rows = {row["id"]: row for row in table(run)}
    assert rows[trials[13].id]["status"] == "diverged" and "nan at step 2" in rows[trials[13].id]["error"]
    assert rows[trials[0].id]["error"] == "out of, memory" and code == 0
    assert "diverged" in out and "1 failed" in out


def test_nothing_left_to_judge_is_a_failed_run(capsys, yaml):
    run = planned(capsys, yaml, "--lrs", "1,2")
    config, store = load_config(run), Store(run)
    for trial in expand(config, config.sweep):
        store.add(make_result(trial, [], seconds=0.1, executor="local", status="failed", error="no memory"))
    code, summary, _, err = sweep(capsys, run)
    assert code == 1 and summary["status"] == "failed" and "none of 2 trials" in err and "no memory" in err
