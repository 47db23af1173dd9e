"""Trials small enough for a test: two layers of width 16, twelve updates, nothing that starts at zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

from ipu_lean.config import SweepConfig
from ipu_lean.sweep.grid import Trial, expand
from tests.data.images.helpers import image_config
from tests.train.helpers import tiny_config


def grid_of(folder: Path, lrs: Any = (1e-3, 4e-3, 1e-2), seeds: Any = (0, 1), grid: Any = None, **sections: Any) -> List[Trial]:
    """The trials of a small grid; `sections` change the configuration, which has no dropout and no zero starts."""
    sections["model"] = {"dropout": 0.0, **sections.get("model", {})}
    sections["mup"] = {"query_zero_init": False, **sections.get("mup", {})}
    sections["train"] = {"eval_every": 0, **sections.get("train", {})}
    config = tiny_config(folder, **sections)
    return expand(config, SweepConfig(lrs=list(lrs), seeds=list(seeds), grid=grid or {}))


def mlp_grid(folder: Path, lrs: Any = (1e-3, 1e-2), seeds: Any = (0, 5), **sections: Any) -> List[Trial]:
    """The same with an MLP on small images."""
    sections["mup"] = {"readout_zero_init": False, **sections.get("mup", {})}
    return expand(image_config(folder, **sections), SweepConfig(lrs=list(lrs), seeds=list(seeds)))
