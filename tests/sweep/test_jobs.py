"""How trials become jobs: nothing lost, nothing mixed, nothing larger than the memory."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest

from ipu_lean.errors import ConfigError
from ipu_lean.sweep import cost, jobs
from ipu_lean.sweep.alike import batchable
from ipu_lean.sweep.jobs import Job, plan_jobs, run_job, together_in_memory
from ipu_lean.sweep.trial import run_trial
from tests.sweep.grids import grid_of

pytestmark = pytest.mark.pod

PLENTY = 2**40


def sizes(planned):
    return [len(job) for job in planned]


def widths(tmp_path, *values, **sections):
    return [trial for width in values for trial in grid_of(tmp_path, lrs=[1e-3, 1e-2], model={"width": width}, **sections)]


@pytest.mark.parametrize("executor", ["sequential", "local", "batched", "auto", "ray"])
def test_every_trial_is_in_one_job_and_jobs_do_not_mix_programs(executor, tmp_path):
    trials = widths(tmp_path, 16, 32, 64)
    planned = plan_jobs(trials, executor, 2, memory=PLENTY)
    assert Counter(trial.id for job in planned for trial in job) == Counter(trial.id for trial in trials)
    assert all(batchable(job) is None for job in planned)
    if executor in ("sequential", "local"):
        assert sizes(planned) == [1] * 12 and [job[0] for job in planned] == trials
    else:
        assert sizes(planned) == [4, 4, 4]
        assert [job[0].axes["width"] for job in planned] == [64, 32, 16]  # the longest first
        assert all(job.probe is (executor != "batched") for job in planned)


def test_pieces_keep_all_workers_busy_and_stay_large(tmp_path):
    trials = grid_of(tmp_path, lrs=[1e-3 * 1.1**i for i in range(8)], seeds=range(5))
    assert sizes(plan_jobs(trials, "batched", 2, memory=PLENTY)) == [20, 20]
    assert sizes(plan_jobs(trials, "batched", 1, memory=PLENTY)) == [20, 20]  # 32 at most
    many = sizes(plan_jobs(trials, "batched", 16, memory=PLENTY))
    assert len(many) == 16 and set(many) <= {2, 3, 4}
    assert sizes(plan_jobs(trials, "batched", 4, memory=PLENTY)) == [10] * 4
    assert sorted(sizes(plan_jobs(trials[:6], "batched", 2, memory=PLENTY))) == [3, 3]
    assert sorted(sizes(plan_jobs(trials[:1], "batched", 2, memory=PLENTY))) == [1]
    assert plan_jobs([], "auto", 2) == []


def test_memory_bounds_a_program(tmp_path, monkeypatch):
    trials = grid_of(tmp_path, lrs=[1e-3 * 1.1**i for i in range(8)], seeds=range(2))
    each = cost.bytes_each(trials[0].config)
    assert together_in_memory(trials[0], 2, memory=2 * 5 * each + each) == 5
    assert max(sizes(plan_jobs(trials, "batched", 2, memory=2 * 5 * each + each))) <= 5
    assert sizes(plan_jobs(trials, "batched", 1, memory=1)) == [1] * 16
    monkeypatch.setattr(cost, "available_bytes", lambda: 8 * each)
    assert together_in_memory(trials[0], 1) == 4  # half of what is free
    monkeypatch.setattr(cost, "available_bytes", lambda: None)
    assert together_in_memory(trials[0], 1) == jobs.TOGETHER


def test_large_models_are_not_even_tried(tmp_path):
    trials = grid_of(tmp_path, model={"width": 256, "seq": 256, "heads": 4}, batch={"micro": 8, "accumulation": 1})
    assert sizes(plan_jobs(trials, "auto", 2, memory=PLENTY)) == [1] * 6
    assert sizes(plan_jobs(trials, "batched", 2, memory=PLENTY)) == [3, 3]


def test_dropout_goes_alone_or_is_refused(tmp_path):
    trials = grid_of(tmp_path, model={"dropout": 0.1})
    assert sizes(plan_jobs(trials, "auto", 2)) == [1] * 6
    with pytest.raises(ConfigError, match="model.dropout: 0.1"):
        plan_jobs(trials, "batched", 2)


def test_a_job_survives_the_way_to_a_worker(tmp_path):
    job = Job(grid_of(tmp_path), probe=True)
    copy = pickle.loads(pickle.dumps(job))
    assert copy == job and copy.probe and type(copy) is Job


@pytest.mark.parametrize("probe", [True, False])
def test_results_come_in_the_order_of_the_trials(probe, tmp_path):
    trials = grid_of(tmp_path, lrs=[1e-3, 1e-2], seeds=[1, 0])
    results = run_job(Job(trials, probe))
    assert [result.id for result in results] == [trial.id for trial in trials]
    for result, trial in zip(results, trials):
        assert result.losses == pytest.approx(run_trial(trial).losses, rel=1e-5)
    (single,) = run_job(Job(trials[:1]))
    assert single.losses == run_trial(trials[0]).losses


def test_available_memory_is_a_number_on_this_machine():
    free = cost.available_bytes()
    assert free is None or 2**20 < free < 2**50
