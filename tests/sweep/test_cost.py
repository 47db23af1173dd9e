"""Estimates beside what is really there."""

from __future__ import annotations

import pytest

from benchmarks._common import LiveBytes
from ipu_lean._compat import TORCH
from ipu_lean.models import build_meta
from ipu_lean.sweep import cost
from ipu_lean.sweep.ensemble import Ensemble
from ipu_lean.sweep.trial import task_of
from tests.sweep.grids import grid_of, mlp_grid

MODELS = {
    "tied": {"width": 64, "seq": 32},
    "long": {"width": 64, "seq": 128, "heads": 4},
    "gated, untied, shared": {
        "width": 128,
        "seq": 64,
        "activation": "swiglu",
        "tied": False,
        "depth": 4,
        "num_hidden_groups": 2,
    },
    "local, two streams": {
        "width": 64,
        "seq": 128,
        "attention": "local",
        "local": {"chunk": 16},
        "tied": False,
        "stack": {"output": "concat"},
    },
}
HASHED = {"width": 64, "seq": 64, "attention": ["local", "lsh"], "local": {"chunk": 8}, "lsh": {"chunk": 16, "hashes": 2}}


@pytest.mark.pod
@pytest.mark.parametrize("name", [*MODELS, "hashed"])
def test_parameters_are_counted(name, tmp_path):
    config = grid_of(tmp_path, model={**MODELS, "hashed": HASHED}[name])[0].config
    true = sum(parameter.numel() for parameter in build_meta(config, 257).parameters())
    assert 0.97 * true < cost.parameters(config) <= true


@pytest.mark.skipif(TORCH < (2, 1), reason="storages have no lasting Python object before torch 2.1")
@pytest.mark.parametrize("name", MODELS)
def test_memory_is_estimated_from_above_and_not_by_much(name, tmp_path):
    trials = grid_of(tmp_path, model=MODELS[name], batch={"micro": 4, "accumulation": 2})
    with LiveBytes() as live:
        together = Ensemble(trials, task_of(trials[0].config))
        together.advance()
        live.peak = live.now  # tracing has its own copies, of shapes only where that is possible
        together.advance()
    each = live.peak / len(trials)
    assert each < cost.bytes_each(trials[0].config) < 2.5 * each


@pytest.mark.pod
def test_work_is_six_for_each_weight_and_token(tmp_path):
    small, large = (grid_of(tmp_path, model={"width": width, "seq": 16})[0].config for width in (64, 128))
    assert cost.work(small) == pytest.approx(4 * 16 * 6 * cost.parameters(small), rel=0.1)  # two rows, accumulated twice
    assert 3 < cost.work(large) / cost.work(small) < 4
    wider = grid_of(tmp_path, model={"width": 64, "seq": 16}, batch={"accumulation": 6})[0].config
    assert cost.work(wider) == pytest.approx(3 * cost.work(small))


@pytest.mark.pod
def test_chunks_cost_what_they_see(tmp_path):
    """Two layers: 2 x 8 keys of a local query, two rounds of 2 x 16 of a hashed one; each score costs two multiplications."""
    config = grid_of(tmp_path, model=HASHED)[0].config
    tokens = config.batch.micro * config.batch.accumulation * 64
    assert cost.work(config) == pytest.approx(6 * tokens * (cost.parameters(config) + 2 * 64 * (16 + 64)))


@pytest.mark.pod
def test_an_mlp_is_counted(tmp_path):
    config = mlp_grid(tmp_path, model={"width": 64, "depth": 3})[0].config
    assert cost.parameters(config) == 64 * (16 + 64 + 64 + 3)  # images of 4 x 4, three classes
    assert cost.work(config) == 4 * 2 * 6 * cost.parameters(config)
