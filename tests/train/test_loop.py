"""Decisions of the loop that no whole run shows."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from ipu_lean.train import loop
from ipu_lean.train.progress import Reporter
from ipu_lean.train.world import World
from tests.train.helpers import tiny_config

pytestmark = pytest.mark.pod


@pytest.mark.parametrize("keep", [True, False])
def test_best_is_the_first_sets_lowest_finite_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    losses = iter([float("nan"), 3.0, 3.0, float("inf"), 2.5])

    def evaluate(*_: Any) -> Any:
        return {
            name: {"loss": value, "accuracy": 0.0, "perplexity": 1.0, "tokens": 1}
            for name, value in (("a", next(losses)), ("b", 0.1))
        }

    monkeypatch.setattr(loop, "evaluate_all", evaluate)
    log = types.SimpleNamespace(write=lambda record: None)
    session = types.SimpleNamespace(
        config=tiny_config(tmp_path, train={"keep_best": keep}),
        world=World(),
        report=Reporter("none"),
        log=log,
        engine=None,
        task=None,
    )
    run = loop.TrainLoop(session)
    wanted, best = [], []
    for step in range(1, 6):
        run.step = step
        wanted.append(run.evaluate())
        best.append(None if run.best is None else run.best["step"])
    assert best == [None, 2, 2, 2, 5] and run.best == {"set": "a", "loss": 2.5, "step": 5}
    assert wanted == [keep and new for new in (False, True, False, False, True)]
