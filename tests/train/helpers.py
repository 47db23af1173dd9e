"""A run small enough for a test: 2 layers of width 16, byte tokens, a text that is generated here."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any, Dict, List, Sequence

import torch
from safetensors.torch import load, save

from ipu_lean.config import Config, make_config

WORDS = [
    "the",
    "lean",
    "transformer",
    "keeps",
    "nothing",
    "that",
    "it",
    "can",
    "rebuild",
    "and",
    "rebuilds",
    "what",
    "it",
    "needs",
    "from",
    "what",
    "it",
    "kept",
]


def write_corpus(path: Path, words: int = 1500, seed: int = 0) -> Path:
    """English-looking text, always the same for a seed."""
    draw = random.Random(seed)
    path.write_text(" ".join(draw.choice(WORDS) for _ in range(words)) + "\n", encoding="utf-8")
    return path


def sections(folder: Path, **changes: Any) -> Dict[str, Any]:
    """A complete configuration as nested dictionaries; `changes` replace or extend sections."""
    base: Dict[str, Any] = {
        "seed": 3,
        "model": {"width": 16, "depth": 2, "heads": 2, "seq": 16, "dropout": 0.1},
        "mup": {"base_width": 8},
        "batch": {"micro": 2, "accumulation": 2},
        "data": {"corpus": str(folder / "corpus.txt"), "validation": {"valid": 0.1}, "cache": str(folder / "cache")},
        "schedule": {"warmup": 2},
        "train": {"steps": 12, "eval_every": 4, "save_every": 3, "log_every": 2, "sample": {"tokens": 8}},
    }
    for name, value in changes.items():
        base[name] = {**base[name], **value} if isinstance(value, dict) and isinstance(base.get(name), dict) else value
    return base


def tiny_config(folder: Path, **changes: Any) -> Config:
    """The same, checked, as a Config; writes the corpus if it is not there."""
    if not (folder / "corpus.txt").exists():
        write_corpus(folder / "corpus.txt")
    return make_config(**sections(folder, **changes))


def write_yaml(folder: Path, **changes: Any) -> Path:
    """The same as a YAML file (JSON is YAML), with its corpus."""
    if not (folder / "corpus.txt").exists():
        write_corpus(folder / "corpus.txt")
    path = folder / "tiny.yaml"
    path.write_text(json.dumps(sections(folder, **changes)), encoding="utf-8")
    return path


def timeless(metrics: Path) -> List[Dict[str, Any]]:
    """The records of a metrics.jsonl without what differs from one run of the clock to the next."""
    records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [
        {key: value for key, value in record.items() if key not in ("time", "tokens_per_s", "data_wait")} for record in records
    ]


def in_two_halves(straight: Any, first: Any, second: Any, given: Sequence[Any]) -> None:
    """Train `straight` on all batches; `first` on three of them and then, through files as checkpoints hold them, `second`."""
    for batch in given:
        straight.train_step(batch)
    for batch in given[:3]:
        first.train_step(batch)
    buffer = io.BytesIO()
    torch.save(first.optimizer_state(), buffer)
    buffer.seek(0)
    second.model.load_state_dict(load(save(first.sync_to_host())))
    second.load_optimizer_state(torch.load(buffer, weights_only=True))
    second.load_state_dict(first.state_dict())
    for batch in given[3:]:
        second.train_step(batch)
