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
