"""Sweeps over an mlp: a trial is what `train` computes, alone, in a batch and on the emulated IPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipu_lean.config import SweepConfig, dump_config, load
from ipu_lean.sweep.ensemble import batchable, run_ensemble
from ipu_lean.sweep.grid import expand
from ipu_lean.sweep.trial import run_trial
from ipu_lean.train import run_train
from ipu_lean.train.progress import Reporter
from tests.data.images.helpers import image_config

pytestmark = pytest.mark.pod


def test_alone_and_in_a_batch(tmp_path: Path) -> None:
    config = image_config(tmp_path, train={"steps": 8, "log_every": 1})
    trials = expand(config, SweepConfig(widths=[16], lrs=[0.01, 0.03], seeds=[3, 4], evaluate=True))
    assert batchable(trials) is None
    alone, together = [run_trial(trial) for trial in trials], run_ensemble(trials)
    for one, other in zip(alone, together):
        assert one.status == other.status == "done" and len(one.losses) == 8
        assert other.losses == pytest.approx(one.losses, rel=1e-5)
        assert other.valid["valid"] == pytest.approx(one.valid["valid"], rel=1e-5)
    trained = run_train(load(dump_config(trials[0].config)), str(tmp_path / "run"), Reporter("none"))
    assert alone[0].losses[-1] == pytest.approx(trained["metrics"]["loss"], rel=1e-6)
    assert alone[0].valid["valid"] == pytest.approx(trained["metrics"]["eval"]["valid"]["loss"], rel=1e-6)


def test_on_the_emulated_ipu(tmp_path: Path) -> None:
    losses = {}
    for device in ("cpu", "ipu-emulated"):
        config = image_config(tmp_path, device=device, train={"steps": 4})
        (trial,) = expand(config, SweepConfig(widths=[24]))
        result = run_trial(trial)
        assert result.status == "done", result.error
        losses[device] = result.losses
    assert losses["ipu-emulated"] == pytest.approx(losses["cpu"], rel=1e-5)
