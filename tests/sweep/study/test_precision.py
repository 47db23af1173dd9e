"""configs/study_precision.yaml in small: pure bf16 loses nothing with its compensations, and much without."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipu_lean.config import load_config
from ipu_lean.sweep.study.judge import compare
from ipu_lean.sweep.study.trial import run_variant
from ipu_lean.sweep.study.variants import variants_of

pytestmark = pytest.mark.pod
CONFIG = Path(__file__).parents[3] / "configs" / "study_precision.yaml"
SMALL = [
    *("model.width=32", "model.depth=2", "model.heads=2", "model.seq=32", "batch.micro=4", "data.corpus=python-docs"),
    *("data.limit=200000", "train.steps=120", "train.eval_batches=32", "schedule.warmup=10", "optimizer.lr=1e-3"),
]


def test_kahan_split_and_stochastic_rounding_learn_as_fp32_does(tmp_path):
    config = load_config(CONFIG, [*SMALL, f"data.cache={tmp_path}", "study.seeds=1"])
    results = {name: [run_variant(trial) for trial in trials] for name, trials in variants_of(config).items()}
    assert all(result.status == "done" for (result,) in results.values())
    found = {name: compare(result, results["fp32"]) for name, result in results.items()}
    for name in ("kahan", "split", "stochastic"):
        assert abs(found[name].relative) < 2e-3 and found[name].norm < 1e-3, name  # one seed, few updates: noise is larger
    assert found["none"].relative > 1e-2
