"""Labelled texts that a small model can tell apart, in the files that users have."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any, List, Tuple

from ipu_lean.config import Config, make_config

WORDS = {
    "fish": ["salt", "wave", "net", "reef", "tide", "gill"],
    "bird": ["nest", "wing", "song", "branch", "egg", "sky"],
    "stone": ["cliff", "sand", "dust", "ore", "grey", "crack"],
}
COMMON = ["the", "a", "of", "and", "in", "is"]


def draw(count: int, classes: int = 3, seed: int = 0) -> List[Tuple[str, str]]:
    """(text, label) pairs, 2 to 9 words each; sorted by class, as a careless file is."""
    random_words = random.Random(seed)
    names = sorted(WORDS)[:classes]
    pairs = []
    for number in range(count):
        label = names[number * classes // count]
        words = [random_words.choice(COMMON + WORDS[label]) for _ in range(random_words.randint(1, 8))]
        pairs.append((" ".join([random_words.choice(WORDS[label]), *words]), label))
    return pairs


def write_jsonl(path: Path, pairs: Any) -> Path:
    """One object a line."""
    path.write_text("".join(json.dumps({"text": text, "label": label}) + "\n" for text, label in pairs), encoding="utf-8")
    return path


def write_csv(path: Path, pairs: Any, delimiter: str = ",") -> Path:
    """A header and a row each."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, delimiter=delimiter)
        rows.writerow(["label", "text"])
        rows.writerows((label, text) for text, label in pairs)
    return path


def labelled_config(folder: Path, labelled: Any = None, **changes: Any) -> Config:
    """A checked configuration of a tiny classifier on `labelled` (a .jsonl of `draw` unless given)."""
    if labelled is None:
        labelled = folder / "texts.jsonl"
        if not labelled.exists():
            write_jsonl(labelled, draw(120))
    base = {
        "seed": 3,
        "model": {"width": 16, "depth": 2, "heads": 2, "seq": 32, "head": "classifier", "causal": False},
        "mup": {"base_width": 8},
        "batch": {"micro": 4, "accumulation": 2},
        "data": {"labelled": str(labelled), "validation": {"valid": 0.25}, "cache": str(folder / "cache")},
        "schedule": {"warmup": 2},
        "train": {"steps": 12, "eval_every": 4, "save_every": 4, "log_every": 2},
    }
    for name, value in changes.items():
        base[name] = {**base[name], **value} if isinstance(value, dict) and isinstance(base.get(name), dict) else value
    return make_config(**base)
