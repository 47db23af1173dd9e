"""The files that a sweep leaves: rows that a program can read, plots of any number of groups."""

from __future__ import annotations

import csv
import math

import pytest

from ipu_lean.config import SweepConfig
from ipu_lean.sweep import report
from ipu_lean.sweep.grid import expand
from ipu_lean.sweep.judge import counts, group_trials
from ipu_lean.sweep.trial import make_result
from tests.sweep.helpers import tiny

pytestmark = pytest.mark.pod


@pytest.fixture
def swept(tmp_path):
    """30 cells of the grid with two rates each: trials and results; one trial diverged, one never ran."""
    grid = {"optimizer.weight_decay": [number / 100 for number in range(30)]}
    trials = expand(tiny(tmp_path), SweepConfig(lrs=[0.01, 0.02], grid=grid))
    results = {trial.id: make_result(trial, [5.0, 3.0 + trial.axes["lr"]], seconds=1.0, executor="local",
                                     valid={"valid": 2.5}) for trial in trials}
    results[trials[0].id] = make_result(trials[0], [5.0, math.inf], seconds=1.0, executor="local")
    del results[trials[1].id]
    return trials, results


def test_rows_hold_full_numbers_and_every_axis(swept, tmp_path):
    trials, results = swept
    report.write_csv(tmp_path / "results.csv", trials, results)
    with open(tmp_path / "results.csv") as handle:
        rows = list(csv.DictReader(handle))
    assert len(rows) == 59 and rows[0]["status"] == "diverged" and rows[0]["loss"] == "inf" and rows[0]["valid_valid"] == ""
    assert [float(row["optimizer.weight_decay"]) for row in rows[1:4]] == [0.01, 0.01, 0.02]
    assert all(float(row["loss"]) == results[row["id"]].loss for row in rows)
    assert rows[1]["valid_valid"] == "2.5" and rows[1]["updates"] == "2"


def test_more_groups_than_fit_are_in_the_table_and_not_all_drawn(swept, tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MOST_PANELS", 3)
    trials, results = swept
    groups = group_trials(trials, results)
    assert len(groups) == 30
    table = report.format_table(groups, counts(trials, results), 1)
    assert table.count("loss by learning rate (one seed, so no error is known;") == 30
    assert "58 done, 1 diverged, 1 missing" in table and "diverged" in table.splitlines()[2]
    title, drawn = report._drawn("t", groups)
    assert len(drawn) == report.MOST_PANELS and "of 30 groups" in title
    report.plot_steps(groups, trials, results, tmp_path / "steps.png", "t")
    assert (tmp_path / "steps.png").read_bytes()[:4] == b"\x89PNG"
