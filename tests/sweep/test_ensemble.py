"""Trials trained together beside the same trials trained one by one."""

from __future__ import annotations

import math

import pytest
import torch

from ipu_lean.errors import ConfigError
from ipu_lean.sweep import ensemble as ensembles
from ipu_lean.sweep.alike import batchable, unfit
from ipu_lean.sweep.ensemble import Ensemble, run_ensemble
from ipu_lean.sweep.trial import run_trial, task_of
from tests.sweep.grids import grid_of, mlp_grid

pytestmark = pytest.mark.pod

RESIDUAL = {"stack": {"kind": "residual"}}
CASES = {
    "reversible": {"mup": {"embedding_std": 0.2}},
    "reversible, zero starts": {"mup": {"query_zero_init": True}},
    "residual, tied": {"model": RESIDUAL, "train": {"clip": 0.05}},
    "residual, untied": {"model": {**RESIDUAL, "tied": False}, "mup": {"readout_zero_init": False}},
    "sandwich, rmsnorm, swiglu": {"model": {"sandwich": True, "norm": "rmsnorm", "activation": "swiglu", "positions": "learned"}},
    "local, axial": {"model": {"attention": "local", "local": {"chunk": 6}, "positions": "axial"}},
    "standard parametrisation": {"mup": {"parametrization": "standard", "base_width": None}},
    "four steps a call": {"batch": {"device_iterations": 4}, "train": {"save_every": 4}},
    "adam": {"optimizer": {"kind": "adam", "eps": 1e-6, "weight_decay": 1e-3}},
    "mlp": {"model": {"kind": "mlp"}},
    "mlp, sgd": {"model": {"kind": "mlp"}, "optimizer": {"kind": "sgd"}},
    "sgd with momentum": {"optimizer": {"kind": "sgd", "momentum": 0.9, "nesterov": True}},
}


def compare(together, alone, tolerance=1e-5):
    assert [result.id for result in together] == [result.id for result in alone]
    for mine, theirs in zip(together, alone):
        assert (mine.status, mine.error, mine.axes) == (theirs.status, theirs.error, theirs.axes)
        assert mine.losses == pytest.approx(theirs.losses, rel=tolerance)


@pytest.mark.parametrize("name", CASES)
def test_every_loss_is_that_of_a_trial_alone(name, tmp_path):
    sgd = "sgd" in name
    make = mlp_grid if "mlp" in name else grid_of
    trials = make(tmp_path, lrs=[0.01, 0.1] if sgd else [1e-3, 1e-2], seeds=[0, 5], **CASES[name])
    found = run_ensemble(trials)
    compare(found, [run_trial(trial) for trial in trials])
    assert all(len(result.losses) == 12 and result.status == "done" and result.executor == "batched" for result in found)
    assert len({result.losses[-1] for result in found}) == len(trials)  # they did not all train the same
    best = min(found, key=lambda result: result.loss)
    assert sum(best.losses[-4:]) < sum(best.losses[:4])  # and did train


def test_what_may_differ_does(tmp_path):
    """Numbers of the update, of the first weights and of the schedule, each trial its own, with evaluation at the end."""
    grid = {
        "optimizer.weight_decay": [0.0, 0.3],
        "optimizer.betas": [[0.9, 0.95], [0.5, 0.9]],
        "optimizer.eps": [1e-8, 1e-3],
        "train.clip": [None, 0.1],
    }
    more = {"mup.init_scale": [0.7, 1.2], "schedule.kind": ["cosine", "constant"], "mup.readout_zero_init": [False, True]}
    untied = {"tied": False, "positions": "sinusoidal"}
    trials = grid_of(tmp_path, lrs=[4e-3], seeds=[1], grid=grid, model=untied)[::3]
    trials += grid_of(tmp_path, lrs=[4e-3], seeds=[2], grid={**more, "mup.embedding_std": [0.1, 0.3]}, model=untied)[::3]
    trials = [type(trial)(trial.config, trial.axes, trial.final_share, True) for trial in trials]
    found, alone = run_ensemble(trials), [run_trial(trial) for trial in trials]
    compare(found, alone)
    for mine, theirs in zip(found, alone):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5) and mine.valid.keys() == {"valid"}
        assert mine.valid["valid"] == pytest.approx(theirs.valid["valid"], rel=1e-5)


def test_a_trial_that_diverges_harms_no_other(tmp_path):
    trials = grid_of(tmp_path, lrs=[1e-3, 4e-3, 3e4], seeds=[0], model={"tied": False})
    found, alone = run_ensemble(trials), [run_trial(trial) for trial in trials]
    compare(found[:2], alone[:2])
    assert (found[2].status, found[2].loss) == ("diverged", math.inf) == (alone[2].status, alone[2].loss)
    step = int(found[2].error.rstrip(".").split()[-1])
    assert step == int(alone[2].error.rstrip(".").split()[-1]) and len(found[2].losses) <= step < 12


def test_diverged_trials_leave_the_program(tmp_path, monkeypatch):
    trials = grid_of(tmp_path, lrs=[1e-3, 3e4, 1e5], seeds=[0], model={"tied": False})
    together = Ensemble(trials, task_of(trials[0].config))
    monkeypatch.setattr(Ensemble, "_shrink", lambda self: None)
    while not any(member.ended for member in together.members):
        together.advance()
    while sum(member.ended for member in together.members) < 2:
        together.advance()
    together.keep([0])
    assert [member.trial for member in together.rows] == trials[:1]
    assert all(stack.shape[0] == 1 for stack in together.weights.values())
    compare(ensembles.finish(together)[:1], [run_trial(trials[0])])


def test_shrinking_waits_until_it_pays(tmp_path):
    trials = grid_of(tmp_path, lrs=[1e-3, 3e4, 1e5], seeds=[0], train={"steps": 400})
    together = Ensemble(trials, task_of(trials[0].config))
    together.advance()
    for member in together.members[1:]:
        member.ended = True
    together.step_seconds = 1e-6
    together._shrink()
    assert len(together.rows) == 3
    together.step_seconds = 10.0
    together._shrink()
    assert len(together.rows) == 1 and together.program is None


def test_all_diverged_is_the_end(tmp_path):
    trials = grid_of(tmp_path, lrs=[3e4, 1e5], seeds=[0], model={"tied": False}, train={"steps": 100})
    together = Ensemble(trials, task_of(trials[0].config))
    results = ensembles.finish(together)
    assert together.step < 20 and {result.status for result in results} == {"diverged"}


@pytest.mark.parametrize(
    "sections, key",
    [
        ({"model": {"dropout": 0.1}}, "model.dropout"),
        ({"model": {"attention_dropout": 0.1}}, "model.attention_dropout"),
        ({"model": {"embedding_dropout": 0.1}}, "model.embedding_dropout"),
        ({"precision": "bf16-mixed"}, "precision"),
        ({"model": {"stack": {"exact": True}}}, "model.stack.exact"),
        ({"model": {"attention": ["lsh", "local"]}}, "model.attention"),
    ],
)
def test_what_cannot_be_exact_is_refused_with_a_reason(sections, key, tmp_path):
    trials = grid_of(tmp_path, **sections)
    assert batchable(trials).startswith(f"`{key}")
    with pytest.raises(ConfigError, match=key):
        run_ensemble(trials)


def test_an_optimizer_that_comes_later_is_not_mistaken_for_one_of_these(tmp_path):
    (trial,) = grid_of(tmp_path, lrs=[1e-3], seeds=[0])
    optimizer = trial.config.optimizer.model_copy(update={"kind": "lion"})
    assert unfit(trial.config) is None
    assert unfit(trial.config.model_copy(update={"optimizer": optimizer})).startswith("`optimizer.kind: lion`")


@pytest.mark.parametrize(
    "key, values",
    [
        ("mup.output_mult", [1.0, 2.0]),
        ("mup.attention_mult", [1.0, 2.0]),
        ("mup.embedding_mult", [1.0, 2.0]),
        ("model.norm_eps", [1e-5, 1e-6]),
        ("model.tied", [True, False]),
        ("optimizer.kind", ["adam", "adamw"]),
    ],
)
def test_what_the_program_holds_as_a_number_must_be_equal(key, values, tmp_path):
    first, second = (grid_of(tmp_path, lrs=[1e-3], seeds=[0], grid={key: [value]}) for value in values)
    assert batchable(first) is None and batchable(second) is None
    assert batchable(first + second).startswith(f"`{key}` is {values[0]}")


def test_what_is_wrong_with_the_program_is_each_trials_failure(tmp_path, monkeypatch):
    trials = grid_of(tmp_path)

    def too_large(*args):
        raise MemoryError("no room for 6 models")

    monkeypatch.setattr(ensembles, "Ensemble", too_large)
    results = run_ensemble(trials)
    assert [result.status for result in results] == ["failed"] * 6
    assert {result.error for result in results} == {"no room for 6 models"}


def test_the_global_generator_is_left_as_it_was(tmp_path):
    trials = grid_of(tmp_path)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run_ensemble(trials)
    assert torch.equal(torch.get_rng_state(), before)
