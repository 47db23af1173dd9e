"""Sweeps over masked language models and classifiers: a trial in a batch is what it is alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ipu_lean.config import SweepConfig
from ipu_lean.errors import ConfigError
from ipu_lean.models import build_model
from ipu_lean.sweep.coord.commands import rows_for
from ipu_lean.sweep.coord.signature import signature_of
from ipu_lean.sweep.ensemble import batchable, run_ensemble
from ipu_lean.sweep.grid import expand
from ipu_lean.sweep.study.variants import check_change
from ipu_lean.sweep.trial import run_trial
from ipu_lean.train.tasks import open_task
from tests.data.labelled.helpers import labelled_config
from tests.train.test_heads import masked_config

pytestmark = pytest.mark.pod


@pytest.mark.parametrize("head", ["masked-lm", "mean"])
def test_alone_and_in_a_batch(tmp_path: Path, head: str) -> None:
    changes = {"train": {"steps": 6}, "model": {"dropout": 0.0}}
    if head == "masked-lm":
        config = masked_config(tmp_path, **changes)
    else:
        config = labelled_config(tmp_path, train={"steps": 6}, model={"pooling": head})
    trials = expand(config, SweepConfig(widths=[16], lrs=[0.01, 0.03], seeds=[3], evaluate=True))
    assert batchable(trials) is None
    alone, together = [run_trial(trial) for trial in trials], run_ensemble(trials)
    for one, other in zip(alone, together):
        assert one.status == other.status == "done", (one.error, other.error)
        assert len(one.losses) == 6 and other.losses == pytest.approx(one.losses, rel=1e-5)
        assert other.valid["valid"] == pytest.approx(one.valid["valid"], rel=1e-5)
    assert alone[0].losses != pytest.approx(alone[1].losses, rel=1e-3)


def test_the_task_is_no_axis(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one task"):
        expand(masked_config(tmp_path), SweepConfig(grid={"model.head": ["masked-lm", "causal-lm"]}))
    with pytest.raises(ConfigError, match="one task"):
        check_change("other", "model.head")


def test_what_a_coordinate_check_measures(tmp_path: Path) -> None:
    """Of a classifier's head, the projection: its multiplier is 1 / 8 at eight times the base."""
    config = labelled_config(tmp_path, model={"width": 64, "stack": {"output": "concat"}})
    task = open_task(config)
    assert rows_for(config, task) == 64
    masked = masked_config(tmp_path)
    assert rows_for(masked, open_task(masked)) == 256  # rows of 16 tokens: 768 hidden ones
    tokens, _ = task.train_batches(4).next()
    found = signature_of(build_model(config, task.vocab), torch.from_numpy(tokens), 64, 0)
    assert found.readout_fan_in == 64 and found.readout == pytest.approx(64**0.5 / 8, rel=0.15)
