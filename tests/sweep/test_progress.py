"""What is said while trials run."""

from __future__ import annotations

import math

import pytest

from ipu_lean.sweep.progress import SweepProgress, describe
from ipu_lean.sweep.results import TrialResult

pytestmark = pytest.mark.pod
AXES = {"parametrization": "mup", "width": 64, "lr": 2.0**-7, "seed": 0}
DONE = TrialResult("a", AXES, "done", [3.5, 3.25], 3.25, seconds=12.34, executor="local")
LOST = TrialResult("b", AXES, "diverged", [3.5], math.inf, error="the loss was nan at step 1")


def test_a_line_says_which_trial_and_what_became_of_it():
    assert describe(DONE) == "mup width 64 lr 2^-7 seed 0  loss 3.2500  (12.3 s, local)"
    assert "diverged: the loss was nan at step 1" in describe(LOST)


def test_plain_is_a_line_a_trial_and_none_is_silent():
    for style, lines in (("plain", 2), ("none", 0)):
        said = []
        with SweepProgress(5, style, said.append) as progress:
            progress.result(DONE)
            progress.result(LOST)
        assert len(said) == lines and all(f"trial {n}/5" in line for n, line in enumerate(said, 1))


def test_a_bar_counts_trials_and_those_that_did_not_end_on_a_narrow_terminal_too(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    with SweepProgress(2, "bar", lambda text: None) as progress:
        progress.result(DONE)
        progress.result(LOST)
    shown = capsys.readouterr().err
    assert "2/2 trials" in shown and "1 not done" in shown
