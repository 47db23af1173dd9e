"""Slopes over sizes and seeds."""
from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest

from ipu_lean.mup.figures import grouped, slope_of


class Row(NamedTuple):
    size: int
    value: float
    name: str = "a"


def test_the_slope_is_the_mean_of_every_seeds_slope() -> None:
    seeds = [[1.0, 1.1, 2.0], [3.0, 2.0, 5.0]]
    rows = [Row(size, value) for values in seeds for size, value in zip((64, 128, 256), values)]
    each = [np.polyfit(np.log2([64, 128, 256]), np.log2(values), 1)[0] for values in seeds]
    assert slope_of(rows, lambda row: row.value) == pytest.approx(np.mean(each), rel=1e-9)


def test_there_is_none_if_one_seed_has_a_zero_or_there_is_one_size() -> None:
    assert slope_of([Row(64, 1.0), Row(64, 0.0), Row(128, 1.0)], lambda row: row.value) is None
    assert slope_of([Row(64, 1.0), Row(64, 2.0)], lambda row: row.value) is None
    assert slope_of([], lambda row: 1.0) is None


def test_groups_keep_the_order_of_their_first_rows() -> None:
    rows = [Row(1, 1.0, "b"), Row(1, 1.0, "a"), Row(2, 1.0, "b")]
    assert [(name, len(part)) for name, part in grouped(rows, lambda row: row.name).items()] == [("b", 2), ("a", 1)]
