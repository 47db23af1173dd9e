"""A tiny sweep over a text of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ipu_lean.config import Config, make_config

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on.\n" * 80


def tiny(folder: Path, **sections: Any) -> Config:
    """Six updates of a GPT of width 16 with two layers."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT)
    base = {
        "name": "tiny",
        "model": {"width": 16, "depth": 2, "heads": 2, "seq": 16, "stack": {"kind": "residual"}},
        "mup": {"base_width": 16},
        "data": {"corpus": str(text), "cache": str(folder / "cache"), "validation": {"valid": 0.2}},
        "batch": {"micro": 2},
        "optimizer": {"lr": 0.01},
        "train": {"steps": 6, "eval_every": 0, "eval_batches": 2, "save_every": 100, "log_every": 1, "threads": 1,
                  "sample": {"tokens": 0}},
        "logging": {"progress": "none"},
    }
    for key, value in sections.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    return make_config(**base)


def fill(directory: Path, slope: Any, noise: float = 1e-4, skip: Any = lambda trial: False, better: Any = 0.1) -> None:
    """Give every trial of a sweep the loss of a surface whose optimum is known: 2^-7.2 at width 16, moving by
    `slope(parametrization)` per doubling of width, 0.1 lower where weight_decay (or the precision) is `better`.
    """
    import math
    import random

    from ipu_lean.config import load_config
    from ipu_lean.sweep.grid import expand
    from ipu_lean.sweep.results import Store
    from ipu_lean.sweep.trial import make_result

    config, draw, store = load_config(directory), random.Random(0), Store(directory)
    for trial in expand(config, config.sweep):
        axes = trial.axes
        doublings = math.log2(axes["width"] / 16)
        away = math.log2(axes["lr"]) + 7.2 - slope(axes["parametrization"]) * doublings
        loss = 3.0 - 0.05 * doublings + 0.02 * away**2 + 0.2 * axes["seed"] + noise * draw.gauss(0, 1)
        loss -= 0.1 * (better in (axes.get("optimizer.weight_decay"), axes.get("precision")))
        if not skip(trial):
            store.add(make_result(trial, [5.0, loss], seconds=0.5, executor="local"))
