"""A trial computes what `train` computes; what goes wrong in it becomes its result."""

from __future__ import annotations

import json
import math

import pytest

from ipu_lean.config import SweepConfig
from ipu_lean.config.loader import Loaded
from ipu_lean.sweep import trial as trials
from ipu_lean.sweep.grid import expand
from ipu_lean.train import run_train
from ipu_lean.train.loggers import read_metrics
from tests.sweep.helpers import tiny

pytestmark = pytest.mark.pod


def the_trial(config, **sweep):
    return expand(config, SweepConfig(**sweep))[0]


DEVICES = {
    "one micro-batch": {},
    "dropout, accumulation, reversible": {
        "model": {"width": 16, "depth": 2, "heads": 2, "seq": 16, "dropout": 0.2},
        "batch": {"micro": 1, "accumulation": 3},
        "seed": 5,
    },
    "ipu-emulated, two updates a call": {"device": "ipu-emulated", "batch": {"micro": 2, "device_iterations": 2}},
}


@pytest.mark.parametrize("sections", DEVICES.values(), ids=DEVICES)
def test_the_same_numbers_as_train(tmp_path, sections):
    config = tiny(tmp_path, **sections)
    result = trials.run_trial(the_trial(config, evaluate=True))
    run_train(Loaded(config, {}, ""), str(tmp_path / "run"))
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    train = {record["step"]: record["loss"] for record in records if record["split"] == "train"}
    assert result.status == "done" and len(result.losses) == config.train.steps
    assert {step: result.losses[step - 1] for step in train} == train and len(train) >= 3
    (valid,) = [record["loss"] for record in records if record["split"] == "valid"]
    assert result.valid == {"valid": valid}
    assert result.loss == result.losses[-1] and result.seconds > 0


def test_a_shared_task_gives_each_seed_its_own_batches(tmp_path):
    pair = expand(tiny(tmp_path), SweepConfig(seeds=[3, 4]))
    task = trials.task_of(pair[0].config)
    assert trials.task_of(pair[1].config) is task
    shared = [trials.run_trial(trial, task).losses for trial in pair]
    alone = [trials.run_trial(trial, trials.open_task(trial.config)).losses for trial in pair]
    assert shared == alone and shared[0] != shared[1]


def test_a_rate_that_is_far_too_high_diverges_and_says_when(tmp_path):
    config = tiny(tmp_path, mup={"parametrization": "standard"}, train={"steps": 40, "clip": None})
    result = trials.run_trial(the_trial(config, lrs=[1e4]))
    assert result.status == "diverged" and result.loss == math.inf and len(result.losses) < 40
    assert "step" in result.error


def test_losses_that_are_not_finite_diverge(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "_update", lambda engine, batches, losses: losses.append(5.0 if len(losses) < 2 else math.nan))
    result = trials.run_trial(the_trial(tiny(tmp_path)))
    assert (result.status, len(result.losses), result.error) == ("diverged", 3, "the loss was nan at step 3")


def test_the_rule_of_divergence():
    assert trials.diverged_at([5.0, 49.9, 3.0]) is None
    assert trials.diverged_at([5.0, 50.1, 3.0]) == 2
    assert trials.diverged_at([5.0, 4.0, math.inf]) == 3
    assert trials.diverged_at([math.nan]) == 1
    assert trials.diverged_at([]) is None


@pytest.mark.parametrize("error, words", [(MemoryError("no room"), "MemoryError: no room"), (ValueError("odd"), "test_trial.py")])
def test_an_error_is_a_failed_trial_and_ends_nothing_else(tmp_path, monkeypatch, error, words):
    def breaks(*_):
        raise error

    monkeypatch.setattr(trials, "build_model", breaks)
    result = trials.run_trial(the_trial(tiny(tmp_path)))
    assert result.status == "failed" and words in result.error and result.loss == math.inf
    json.dumps(result.as_json(), allow_nan=False)


def test_evaluating_the_trained_model_apart_gives_the_same(tmp_path):
    trial = the_trial(tiny(tmp_path), evaluate=True)
    task = trials.task_of(trial.config)
    model = trials.build_model(trial.config, task.vocab)
    engine = trials.make_engine(model, trial.config, trials.World())
    batches = task.train_batches(2, trial.config.seed)
    for _ in range(6):
        engine.train_step(batches.next())
    assert trials.evaluate_trained(trial, model, task) == trials.run_trial(trial).valid
