"""The whole command: run, judge, kill, go on, extend, refuse."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ipu_lean import cli
from ipu_lean.config import dump_config, load_config
from ipu_lean.sweep.directory import SweepDirectory
from ipu_lean.sweep.grid import expand
from ipu_lean.sweep.results import Store
from ipu_lean.sweep.trial import make_result, run_trial
from tests.sweep.helpers import fill, tiny

pytestmark = pytest.mark.pod
ROOT = Path(__file__).parents[2]
WIDE = ["--widths", "16..64", "--lrs", "2^-11..2^-5", "--seeds", "2", "--parametrizations", "mup,standard"]


@pytest.fixture
def yaml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(dump_config(tiny(tmp_path)))
    return str(path)


def sweep(capsys, *arguments):
    """(exit code, the JSON object, stdout, stderr) of `ipu-lean sweep …`."""
    code = cli.main(["sweep", *map(str, arguments), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out.splitlines()[-1]), out, err


def table(run):
    """The rows of results.csv."""
    with open(run / "results.csv") as handle:
        return list(csv.DictReader(handle))


def planned(capsys, yaml, *flags):
    """A directory whose trials have not run."""
    code, summary, out, err = sweep(capsys, yaml, *flags, "--out", "out", "--plan")
    assert code == 0 and summary["metrics"]["counts"]["missing"] == summary["metrics"]["counts"]["trials"]
    assert f"{summary['metrics']['counts']['trials']} trials" in err and "judge all: ipu-lean sweep" in out
    return Path("out").absolute()


def test_a_sweep_from_beginning_to_end(capsys, yaml):
    flags = ["--widths", "16,32", "--lrs", "1e-3,1e-2,1e-1", "--executor", "sequential", "--evaluate"]
    code, summary, out, err = sweep(capsys, yaml, *flags, "--out", "out")
    assert code == 0 and summary["verdict"] == "inconclusive" and "warning: inconclusive" in err
    assert summary["metrics"]["counts"] == {"trials": 6, "done": 6, "diverged": 0, "failed": 0, "missing": 0}
    for name in ("results", "table", "plot", "steps"):
        assert Path(summary["artifacts"][name]).stat().st_size > 100
    assert out.startswith((Path("out") / "table.txt").read_text()) and "trial 6/6" not in err  # logging.progress: none
    kept = json.loads((Path("out") / "summary.json").read_text())
    assert kept["command"] == "sweep" and kept["verdict"] == "inconclusive" and "table" not in kept
    config = load_config("out")
    rows = table(Path("out"))
    for trial, row in zip(expand(config, config.sweep), rows):
        result = run_trial(trial)
        assert (row["id"], float(row["loss"]), float(row["valid_valid"])) == (trial.id, result.loss, result.valid["valid"])
        assert (int(row["width"]), float(row["lr"]), row["status"]) == (trial.axes["width"], trial.axes["lr"], "done")


def test_the_section_says_the_same_as_the_flags(capsys, yaml, tmp_path):
    text = Path(yaml).read_text().replace("sweep: null", "sweep: {widths: '16..32', lrs: '2^-7,2^-5', seeds: 2}")
    (tmp_path / "section.yaml").write_text(text)
    sweep(capsys, "section.yaml", "--out", "one", "--plan")
    sweep(capsys, yaml, "--widths", "16..32", "--lrs", "2^-7,2^-5", "--seeds", "2", "--out", "two", "--plan")
    assert load_config("one") == load_config("two")
    sweep(capsys, "section.yaml", "--lrs", "1e-2,1e-3", "--out", "three", "--plan")
    assert load_config("three").sweep.lrs == [1e-3, 1e-2] and load_config("three").sweep.widths == [16, 32]


def test_lists_on_the_command_line_are_axes(capsys, yaml):
    planned(capsys, yaml, "optimizer.weight_decay=[0,0.1]", "optimizer.betas=[[0.9,0.95],[0.9,0.99]]", "ipu.layers_per_ipu=[2]")
    config = load_config("out")
    assert config.sweep.grid == {"optimizer.weight_decay": [0, 0.1], "optimizer.betas": [[0.9, 0.95], [0.9, 0.99]]}
    assert len(expand(config, config.sweep)) == 4 and config.ipu.layers_per_ipu == [2]


def moving(standard=-1.0, mup=0.0):
    return lambda parametrization: standard if parametrization == "standard" else mup


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


def test_shares_divide_the_trials_and_a_last_call_judges(capsys, yaml):
    run = planned(capsys, yaml, "--lrs", "2^-8..2^-4", "--executor", "sequential")
    for share in range(2):
        code, summary, out, _ = sweep(capsys, run, "--share", f"{share}/2")
        assert code == 0 and summary["verdict"] is None and summary["metrics"]["counts"]["missing"] == 0
        assert len(list((run / "trials").iterdir())) == (3, 5)[share] and not (run / "results.csv").exists()
    _, summary, _, _ = sweep(capsys, run)
    assert summary["metrics"]["counts"]["done"] == 5 and (run / "results.csv").exists()


MISTAKES = [
    ("no axis has two values", []),
    ("rise", ["--lrs", "2^-4..2^-8"]),
    ("one batch size", ["batch.micro=[1,2]"]),
    ("--lrs", ["optimizer.lr=[1,2]"]),
    ("one of auto, sequential, local, batched, ray", ["--lrs", "1,2", "--executor", "slurm"]),
    ("greater than 0", ["--lrs", "0,1"]),
    ("width 33", ["--widths", "16,33"]),
    ("K/N", ["--lrs", "1,2", "--share", "2/2"]),
    ("has begun", ["--lrs", "1,2", "--retry"]),
    ("did you mean `optimizer.lr`", ["--lrs", "1,2", "lr=3"]),
    ("muP needs a base", ["--widths", "16,32", "mup.base_width=null"]),
    ("longer than the warm-up", ["--lrs", "1,2", "schedule.warmup=6"]),
    ("cannot be trained together", ["--lrs", "1,2", "--executor", "batched", "model.dropout=0.1"]),
    ("how it grows with width", ["--widths", "16,32", "model.ffn_width=64"]),
    ("no such file", ["--lrs", "1,2", "data.corpus=nowhere.txt"]),
    ("one global batch needs", ["--lrs", "1,2", "batch.micro=5000"]),
]


@pytest.mark.parametrize("words, flags", MISTAKES, ids=[words for words, _ in MISTAKES])
def test_mistakes_are_told_before_anything_is_written(capsys, yaml, words, flags):
    code, _, _, err = sweep(capsys, yaml, *flags, "--out", "out")
    assert code == 2 and words in err and not Path("out").exists()


def test_a_missing_ray_is_told_before_anything_is_written(capsys, yaml, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    code, _, _, err = sweep(capsys, yaml, "--lrs", "1,2", "--executor", "ray", "--out", "out")
    assert code == 3 and "Ray" in err and not Path("out").exists()


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


def test_train_reads_past_the_section_and_resume_refuses_the_directory(capsys, yaml):
    run = planned(capsys, yaml, "--lrs", "2^-7,2^-6")
    assert cli.main(["resume", str(run)]) == 2
    assert "made by `sweep`" in capsys.readouterr().err


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
