"""A sweep that was stopped or killed, that grows, or that something has changed under."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ipu_lean.config import load_config
from ipu_lean.sweep.directory import SweepDirectory
from ipu_lean.sweep.grid import expand
from ipu_lean.sweep.results import Store
from ipu_lean.sweep.trial import failed_result, make_result, run_trial
from tests.sweep.commandline import moving, planned, sweep
from tests.sweep.helpers import fill

pytestmark = pytest.mark.pod
ROOT = Path(__file__).parents[2]


def test_retry_runs_what_failed(capsys, yaml):
    run = planned(capsys, yaml, "--lrs", "2^-7,2^-6", "--executor", "sequential")
    config, store = load_config(run), Store(run)
    first, second = expand(config, config.sweep)
    store.add(make_result(first, [], seconds=0.1, executor="local", status="failed", error="no memory"))
    store.add(make_result(second, [5.0, 4.0], seconds=0.1, executor="local"))
    _, summary, _, _ = sweep(capsys, run)
    assert summary["metrics"]["counts"]["failed"] == 1
    _, summary, _, _ = sweep(capsys, run, "--retry")
    assert summary["metrics"]["counts"]["done"] == 2
    assert store.get(second.id).losses == [5.0, 4.0] and store.get(first.id).losses == run_trial(first).losses


def test_axes_may_grow_and_nothing_is_repeated(capsys, yaml):
    run = planned(capsys, yaml, "--widths", "16..64", "--lrs", "2^-10..2^-7", "--seeds", "2")
    fill(run, moving())
    _, summary, _, err = sweep(capsys, run)
    assert summary["verdict"] == "inconclusive" and "highest learning rate" in err
    before = {path.name: path.stat().st_mtime_ns for path in (run / "trials").iterdir()}
    sweep(capsys, run, "--lrs", "2^-10..2^-5", "--plan")
    fill(run, moving(), skip=lambda trial: f"{trial.id}.json" in before)
    _, summary, _, _ = sweep(capsys, run)
    assert summary["verdict"] == "pass" and summary["metrics"]["counts"]["trials"] == 36
    assert all((run / "trials" / name).stat().st_mtime_ns == stamp for name, stamp in before.items())
    assert load_config(run).sweep.lrs == [2.0**power for power in range(-10, -4)]


def test_an_axis_of_a_sweep_that_has_begun_is_added_to_what_is_there(capsys, yaml):
    """A user who gives the one rate that is missing keeps the others."""
    run = planned(capsys, yaml, "--lrs", "2^-9..2^-7", "--seeds", "2", "optimizer.weight_decay=[0.2,0]")
    fill(run, moving())
    ids = {trial.id for trial in expand(load_config(run), load_config(run).sweep)}
    flags = ["--lrs", "2^-10", "--widths", "32", "--seeds", "3,5", "optimizer.weight_decay=[0.1]", "model.bias=[false]", "--plan"]
    code, summary, _, _ = sweep(capsys, run, *flags)
    config = load_config(run)
    assert config.sweep.lrs == [2.0**power for power in range(-10, -6)] and config.sweep.seeds == [0, 1, 3, 5]
    assert config.sweep.widths == [16, 32] and config.sweep.depths == []  # the one width that all trials had, and no axis
    assert config.sweep.grid == {"optimizer.weight_decay": [0, 0.1, 0.2], "model.bias": [True, False]}
    assert ids <= {trial.id for trial in expand(config, config.sweep)}
    assert code == 0 and summary["metrics"]["counts"]["done"] == len(ids) == 12 and summary["metrics"]["counts"]["trials"] == 192
    before = (run / "config.yaml").read_text()
    sweep(capsys, run, "--lrs", "2^-8", "--seeds", "1", "--plan")
    assert (run / "config.yaml").read_text() == before


def test_another_final_share_is_another_mean_of_the_same_losses(capsys, yaml):
    """And only what needs the weights trains again."""
    run = planned(capsys, yaml, "--lrs", "2^-9..2^-5", "--executor", "sequential")
    sweep(capsys, run)
    config, store = load_config(run), Store(run)
    lost, wild, *_ = trials = expand(config, config.sweep)
    former = {trial.axes["lr"]: store.get(trial.id) for trial in trials}
    store.add(failed_result(lost, "no memory", "local"))
    store.add(make_result(wild, [5.0, float("nan")], seconds=0.1, executor="local"))
    _, summary, _, err = sweep(capsys, run, "--final-share", "0.5")
    assert "5 of them finished before" in err and summary["metrics"]["counts"]["failed"] == 1
    config = load_config(run)
    for trial in expand(config, config.sweep)[2:]:
        losses = former[trial.axes["lr"]].losses
        assert (store.get(trial.id).loss, store.get(trial.id).losses) == (sum(losses[-3:]) / 3, losses)
    _, summary, _, err = sweep(capsys, run, "--evaluate", "--retry")
    assert "1 of them finished before" in err and summary["metrics"]["counts"] == {  # the one that diverged
        "trials": 5, "done": 4, "diverged": 1, "failed": 0, "missing": 0}
    _, _, _, err = sweep(capsys, run, "--final-share", "0.1")
    config = load_config(run)
    assert "5 of them finished before" in err and store.get(expand(config, config.sweep)[0].id).valid


def test_shares_divide_the_trials_and_a_last_call_judges(capsys, yaml):
    run = planned(capsys, yaml, "--lrs", "2^-8..2^-4", "--executor", "sequential")
    for share in range(2):
        code, summary, out, _ = sweep(capsys, run, "--share", f"{share}/2")
        assert code == 0 and summary["verdict"] is None and summary["metrics"]["counts"]["missing"] == 0
        assert len(list((run / "trials").iterdir())) == (3, 5)[share] and not (run / "results.csv").exists()
    _, summary, _, _ = sweep(capsys, run)
    assert summary["metrics"]["counts"]["done"] == 5 and (run / "results.csv").exists()


@pytest.mark.parametrize("key", ["train.steps=7", "batch.micro=3", "mup.base_width=8", "model.bias=false"])
def test_a_sweep_goes_on_with_what_it_began_with(capsys, yaml, key):
    run = planned(capsys, yaml, "--lrs", "2^-7,2^-6")
    before = (run / "config.yaml").read_text()
    code, _, _, err = sweep(capsys, run, key)
    assert ("or make it an axis" in err) == (key == "model.bias=false") and "tart a new sweep" in err
    assert code == 2 and f"`{key.split('=')[0]}" in err and (run / "config.yaml").read_text() == before
    code, _, _, err = sweep(capsys, run, "--out", "other")
    assert code == 2 and "own directory" in err


def test_a_second_process_changes_nothing_under_the_first(capsys, yaml):
    run = planned(capsys, yaml, "--lrs", "2^-7,2^-6", "--executor", "sequential")
    before, first = (run / "config.yaml").read_text(), SweepDirectory.reopen(str(run))
    first.lock()
    for flags in (["--lrs", "2^-7..2^-3"], ["--lrs", "2^-7..2^-3", "--plan"], []):
        code, _, _, err = sweep(capsys, run, *flags)
        assert code == 1 and "another process is running the sweep in" in err and (run / "config.yaml").read_text() == before
    first.unlock()
    code, _, _, _ = sweep(capsys, run, "--lrs", "2^-7..2^-3", "--plan")
    assert code == 0 and len(load_config(run).sweep.lrs) == 5


def test_an_unchanged_text_is_demanded(capsys, yaml, tmp_path):
    run = planned(capsys, yaml, "--lrs", "2^-7,2^-6", "--executor", "sequential")
    (tmp_path / "text.txt").write_text("another text altogether\n" * 200)
    code, _, _, err = sweep(capsys, run)
    assert code == 1 and "text has changed" in err and not list((run / "trials").iterdir())


def test_a_sweep_that_is_killed_loses_nothing(capsys, yaml):
    check_kills_lose_nothing(capsys, yaml, kills=1)


def check_kills_lose_nothing(capsys, yaml, kills):
    """Kill a sweep at random moments after one or two more trials, let another process end it, compare with trials alone."""
    run = planned(capsys, yaml, "--lrs", "2^-9..2^-2", "--workers", "1", "--executor", "local", "train.steps=40")
    trials = run / "trials"
    command = [sys.executable, "-m", "ipu_lean", "sweep", str(run)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    draw, stamps = random.Random(0), {}
    for kill in range(kills):
        target = len(list(trials.iterdir())) + 1 + kill % 2
        process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 90
        while len(list(trials.glob("*.json"))) < min(target, 7) and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.2 * draw.random())
        process.send_signal(signal.SIGKILL)
        process.wait()
        for path in trials.glob("*.json"):
            assert json.loads(path.read_text())["status"] == "done"
            assert stamps.setdefault(path.name, path.stat().st_mtime_ns) == path.stat().st_mtime_ns
    assert stamps
    code, summary, _, _ = sweep(capsys, run, "--executor", "sequential")
    assert code == 0 and summary["metrics"]["counts"]["done"] == 8
    assert all((trials / name).stat().st_mtime_ns == stamp for name, stamp in stamps.items())
    config = load_config(run)
    for trial in expand(config, config.sweep)[::3]:
        assert Store(run).get(trial.id).losses == run_trial(trial).losses


def test_ctrl_c_keeps_what_is_finished_and_says_how_to_go_on(capsys, yaml):
    run = planned(capsys, yaml, "--lrs", "2^-9..2^-2", "--workers", "1", "--executor", "local", "train.steps=2000")
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "ipu_lean", "sweep", str(run)]
    process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if line.startswith("executor"):
            break
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and f"ipu-lean sweep {run}" in err and "Traceback" not in err
    assert json.loads((run / "summary.json").read_text())["status"] == "interrupted"
