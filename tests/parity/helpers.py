"""A run small enough to be trained on two devices in a second or two: four layers' worth of everything, on two IPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional

from ipu_lean.config import Config, make_config
from ipu_lean.parity import Comparison, Row, Start, Trace, compare, for_device, make_start, record
from tests.train.helpers import write_corpus


def sections(folder: Path, **changes: Any) -> Dict[str, Any]:
    """Two IPUs in a pipeline, a readout that may come back to the first, five micro-batches, two updates a call."""
    if not (folder / "corpus.txt").exists():
        write_corpus(folder / "corpus.txt", 3000)
    base: Dict[str, Any] = {
        "seed": 3,
        "model": {"width": 32, "depth": 2, "heads": 2, "seq": 16},
        "mup": {"base_width": 16},
        "batch": {"micro": 2, "accumulation": 5, "device_iterations": 2},
        "data": {"corpus": str(folder / "corpus.txt"), "validation": {"valid": 0.1}, "cache": str(folder / "cache")},
        "optimizer": {"lr": 5e-3},
        "schedule": {"kind": "cosine", "warmup": 3},
        "train": {"steps": 20, "eval_every": 4, "save_every": 4},
        "ipu": {"layers_per_ipu": [1, 1]},
    }
    for name, value in changes.items():
        base[name] = {**base[name], **value} if isinstance(value, dict) and isinstance(base.get(name), dict) else value
    return base


def config_in(folder: Path, **changes: Any) -> Config:
    """The same, checked."""
    return make_config(**sections(folder, **changes))


def both(config: Config, updates: int, start: Optional[Start] = None) -> Comparison:
    """CPU against the emulator."""
    start = start or make_start(config, updates)
    return compare(traced(config, "cpu", start), traced(config, "ipu-emulated", start))


def traced(config: Config, device: str, start: Start, edit: Any = None) -> Trace:
    """One side."""
    return record(for_device(config, device), start, edit)


def judged(comparison: Comparison, kind: str) -> List[Row]:
    """Rows that count."""
    return [row for row in comparison.rows if row.kind == kind and row.status in ("ok", "differs")]
