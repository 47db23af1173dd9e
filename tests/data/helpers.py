"""What several tests of this room need."""
from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Optional

import pytest

import ipu_lean
from ipu_lean.config import Config, make_config

ROOT = Path(ipu_lean.__file__).resolve().parents[1]


def config(cache: Path, seq: int = 16, **data: Any) -> Config:
    """A config whose data section is `data`, with its cache in `cache`."""
    return make_config(model={"seq": seq}, mup={"base_width": 64}, data={"cache": str(cache), **data})


def prose(characters: int, seed: int = 0) -> str:
    """Lines of made-up words, some with letters of two and three bytes; about one double blank and one empty line in ten."""
    rng = random.Random(seed)
    words = ["".join(rng.choice("aeiounrstlé\u2019") for _ in range(rng.randint(1, 9))) for _ in range(500)]
    parts, length = [], 0
    while length < characters:
        parts.append(rng.choice(words) + rng.choice([" "] * 8 + ["\n", "  ", "\n\n"]))
        length += len(parts[-1])
    return "".join(parts)[:characters]


def python(code: str, cwd: Path, env: Optional[Dict[str, str]] = None) -> subprocess.Popen:
    """Start another Python that can import the package and this module."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {**os.environ, "PYTHONPATH": path, **(env or {})}
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=str(cwd), env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def folder_bytes(folder: Path) -> Dict[str, bytes]:
    """Every file in a folder, by relative name."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def without_package(kind: str) -> None:
    """Skip the test that calls this if the tokenizer kind's package is not installed."""
    if kind != "bytes":
        pytest.importorskip({"bpe": "tokenizers"}.get(kind, kind))


DOCUMENTS = [prose(150_000, 1), prose(10, 2), prose(66_000, 3), prose(131_072, 4)]
"""Texts of the fixture `text`; two are longer than a piece."""
