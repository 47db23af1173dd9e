"""What a run says about itself before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ipu_lean.config import Config
from ipu_lean.models import build_model
from ipu_lean.train.banner import banner, count_parameters, flat, non_defaults
from ipu_lean.train.world import World
from tests.train.helpers import tiny_config

pytestmark = pytest.mark.pod


def test_only_what_differs(tmp_path: Path) -> None:
    found = non_defaults(tiny_config(tmp_path))
    assert found["model.width"] == 16 and found["data.validation"] == {"valid": 0.1} and "optimizer.lr" not in found
    assert non_defaults(Config()) == {}
    assert flat(Config())["train.fp16_scale.window"] == 2000


def test_tied_tensors_count_once(tmp_path: Path) -> None:
    config = tiny_config(tmp_path)
    tied, untied = (build_model(tiny_config(tmp_path, model={"tied": tied}), 257) for tied in (True, False))
    assert count_parameters(untied) - count_parameters(tied) == 257 * 16
    text = "\n".join(banner(config, tied, 257, World()))
    assert f"{count_parameters(tied):,} parameters" in text and "1 process," in text and "reversible stack" in text
    assert "lr 0.003 -> 0.0003" in text
    hashed = tiny_config(tmp_path, model={"depth": 4, "attention": ["local", "lsh"], "local": {"chunk": 4}})
    assert "2 heads of local and lsh attention" in "\n".join(banner(hashed, build_model(hashed, 257), 257, World()))
    assert "2 processes (ddp)" in "\n".join(banner(config, tied, 257, World(0, 2)))
