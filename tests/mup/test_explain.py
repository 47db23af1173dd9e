"""The printed table shows what it was given, and folds equal layers into one line."""
from __future__ import annotations

import math

import pytest

from ipu_lean.mup import Role, collapse_rows, explain_rows, format_table

pytestmark = pytest.mark.pod

ROLES = {
    "table.weight": Role("embedding", 1.0, 4.0, forward_mult=0.25, init_std=0.1, tied=True),
    **{f"blocks.{i}.up.weight": Role("hidden", 4.0, 4.0, 0.5, init_std=0.125) for i in (0, 1, 2, 4)},
    "blocks.3.up.weight": Role("hidden", 4.0, 4.0, 0.25, init_std=0.125),
    "scale": Role("vector", 1.0, 1.0, init_std=math.nan),
}
SHAPES = {name: (10, 64) if name == "table.weight" else (64, 64) for name in ROLES}
SHAPES["scale"] = ()
BASE = {name: (None, 16) if name == "table.weight" else (16, 16) for name in ROLES}
BASE["scale"] = ()
SETTINGS = {name: {"lr": 0.001, "weight_decay": 0.4, "eps": 2.5e-9, "kind": "x"} for name in ROLES}
SETTINGS["scale"] = {"lr": 0.004, "weight_decay": 0.0}


def test_rows():
    rows = explain_rows(ROLES, SHAPES, BASE, SETTINGS)
    assert [row["name"] for row in rows] == list(ROLES)
    assert rows[0] == {
        "name": "table.weight", "kind": "embedding", "tied": True, "shape": [10, 64], "base_shape": [None, 16],
        "m_in": 1.0, "m_out": 4.0, "init_std": 0.1,
        "forward_mult": 0.25, "depth_mult": 1.0, "lr": 0.001, "decay": 0.4, "eps": 2.5e-9,
    }  # fmt: skip
    assert rows[-1]["init_std"] is None and rows[-1]["eps"] is None and rows[-1]["decay"] == 0.0


def test_equal_layers_fold():
    names = [row["name"] for row in collapse_rows(explain_rows(ROLES, SHAPES, BASE, SETTINGS))]
    assert names == ["table.weight", "blocks.{0-2,4}.up.weight", "blocks.3.up.weight", "scale"]


def test_table():
    lines = format_table(explain_rows(ROLES, SHAPES, BASE, SETTINGS)).split("\n")
    assert lines[0].split()[:4] == ["name", "kind", "shape", "base_shape"] and len(lines) == 2 + len(ROLES)
    assert " ".join(lines[2].split()) == "table.weight * embedding 10x64 .x16 1 4 0.1 0.25 1 0.001 0.4 2.5e-09"
    assert " ".join(lines[-1].split()) == "scale vector scalar scalar 1 1 - 1 1 0.004 0 -"
