"""Together or one by one: the choice follows the clock, and the steps that were timed are not lost."""

from __future__ import annotations

import pytest

from ipu_lean.sweep import probe
from ipu_lean.sweep.ensemble import Ensemble
from ipu_lean.sweep.trial import run_trial, task_of
from tests.sweep.grids import grid_of

pytestmark = pytest.mark.pod


@pytest.fixture
def clock(monkeypatch):
    """Seconds of an update by number of trials (1: alone), in place of the real clock; nothing is known before."""
    seconds = {}
    real = probe.seconds_together

    def together(ensemble):
        real(ensemble)
        return seconds[len(ensemble.members)]

    monkeypatch.setattr(probe, "seconds_alone", lambda trial, task: seconds[1])
    monkeypatch.setattr(probe, "seconds_together", together)
    monkeypatch.setattr(probe, "_known", {})
    monkeypatch.setattr(probe, "TRACING", 0.0)  # real seconds, which a busy machine stretches
    return seconds


@pytest.mark.parametrize(
    "seconds, size",
    [
        ({1: 1.0, 8: 0.3, 4: 0.31}, 8),
        ({1: 1.0, 8: 0.3, 4: 0.2}, 4),
        ({1: 1.0, 8: 0.95}, 1),  # faster, but by too little
        ({1: 1.0, 8: 2.0}, 1),
        ({1: 1e-6}, 1),  # so little to do that nothing else is tried
    ],
)
def test_the_fastest_way_is_taken_and_remembered(seconds, size, clock, tmp_path):
    clock.update(seconds)
    trials = grid_of(tmp_path, lrs=[1e-3, 2e-3, 4e-3, 8e-3], seeds=[0, 1], train={"steps": 60})
    task = task_of(trials[0].config)
    choice = probe.choose(trials, task)
    assert choice.size == size
    if size > 1:
        assert [member.trial for member in choice.ensemble.members] == trials[:size]
        assert choice.ensemble.step == probe.STEPS + 1
    else:
        assert choice.ensemble is None
    again = probe.choose(trials, task)
    assert again.size == size and again.ensemble is None


@pytest.mark.parametrize("seconds", [{1: 1.0, 4: 0.5}, {1: 1.0, 4: 3.0}])
def test_all_results_come_either_way(seconds, clock, tmp_path):
    clock.update(seconds)
    trials = grid_of(tmp_path, lrs=[1e-3, 1e-2], seeds=[0, 1], train={"steps": 9, "save_every": 9})
    results = list(probe.run_probed(trials, True, "local"))
    assert [result.executor for result in results] == ["batched" if seconds[4] < 1 else "local"] * 4
    for result, trial in zip(results, trials):
        assert result.losses == pytest.approx(run_trial(trial).losses, rel=1e-5)


def test_what_cannot_be_batched_is_trained_alone(clock, monkeypatch, tmp_path):
    clock.update({1: 1.0})

    def broken(self):
        raise NotImplementedError("no batching rule")

    monkeypatch.setattr(Ensemble, "advance", broken)
    trials = grid_of(tmp_path, lrs=[1e-3], train={"steps": 4, "save_every": 4})
    assert [result.status for result in probe.run_probed(trials, True, "local")] == ["done", "done"]


def test_a_first_trial_that_diverges_costs_no_other(monkeypatch, tmp_path):
    """Steps are timed on the first trial, whose numbers may end at once: that says nothing about the rest."""
    monkeypatch.setattr(probe, "_known", {})
    steps = {"steps": 9, "save_every": 9, "clip": None}
    trials = grid_of(tmp_path, lrs=[1e-3], seeds=[0], grid={"mup.init_scale": [1e30, 1.0]}, train=steps)
    assert (run_trial(trials[0]).status, run_trial(trials[0]).losses) == ("diverged", [])
    assert [result.status for result in probe.run_probed(trials, True, "local")] == ["diverged", "done"]


def test_the_real_clock_gives_a_choice(tmp_path):
    trials = grid_of(tmp_path, lrs=[1e-3], train={"steps": 8})
    task = task_of(trials[0].config)
    assert 0 < probe.seconds_alone(trials[0], task) < 10
    assert 0 < probe.seconds_together(Ensemble(trials, task)) < 10
