"""A variant's numbers are those of `train`; memory is what the benchmark's counter counts."""

from __future__ import annotations

import math

import pytest
import torch

from benchmarks._common import LiveBytes, parameters_and_gradients
from ipu_lean._compat import TORCH
from ipu_lean.config.loader import Loaded
from ipu_lean.models import TrainStep, build_model
from ipu_lean.sweep.study.result import VariantResult, VariantStore
from ipu_lean.sweep.study.trial import run_variant
from ipu_lean.sweep.study.variants import variants_of
from ipu_lean.sweep.trial import task_of
from ipu_lean.train import run_train
from ipu_lean.train.loggers import read_metrics
from tests.sweep.helpers import tiny

pytestmark = pytest.mark.pod


def variant(tmp_path, changes, **sections):
    return variants_of(tiny(tmp_path, study={"variants": {"it": changes}}, **sections))["it"][0]


def test_numbers_are_those_of_train(tmp_path):
    changes = {"model.stack.kind": "reversible", "model.dropout": 0.2}
    trial = variant(tmp_path, changes)
    result = run_variant(trial)
    run_train(Loaded(trial.config, {}, ""), str(tmp_path / "run"))
    records = [record for record in read_metrics(tmp_path / "run" / "metrics.jsonl") if record["split"] == "train"]
    assert result.status == "done" and result.tokens_per_s > 0
    assert result.losses == [record["loss"] for record in records]
    assert result.grad_norms == [record["grad_norm"] for record in records]


@pytest.mark.skipif(TORCH < (2, 1), reason="storages have no lasting Python object before torch 2.1")
def test_peak_is_what_the_benchmarks_count(tmp_path):
    trial = variant(tmp_path, {"model.stack.kind": "reversible"}, model={"seq": 64}, train={"steps": 2})
    task = task_of(trial.config)
    model = build_model(trial.config, task.vocab)
    inputs, labels = (torch.from_numpy(part) for part in task.blank(trial.config.batch.micro))
    with LiveBytes([*parameters_and_gradients(model), *model.buffers(), inputs, labels]) as live:
        loss, _ = TrainStep(model)(inputs, labels)
        loss.backward()
    assert run_variant(trial).peak_mb == pytest.approx(live.peak / 1e6, rel=0.02)
    stored = variant(tmp_path, {"model.depth": 6, "memory.engine": "store"}, model={"seq": 64}, train={"steps": 2})
    assert run_variant(stored).peak_mb > 1.5 * live.peak / 1e6


def test_divergence_and_failure_are_results(tmp_path):
    wild = variant(tmp_path, {"optimizer.lr": 1e6, "train.clip": None}, train={"steps": 30}, mup={"parametrization": "standard"})
    result = run_variant(wild)
    assert result.status == "diverged" and len(result.losses) < 30 and math.isinf(result.loss)
    store = VariantStore(tmp_path)
    store.add(result)
    again = store.get(result.id)
    assert isinstance(again, VariantResult) and again.losses == result.losses and again.peak_mb == result.peak_mb
    assert [str(value) for value in again.grad_norms] == [str(value) for value in result.grad_norms]
