"""Verdicts and slopes, against numbers that can be worked out by hand."""
from __future__ import annotations

import json
import math

import numpy as np
import pytest

from ipu_lean.mup.verdict import FAIL, INCONCLUSIVE, PASS, Verdict, overall, slope


def made(status: str) -> Verdict:
    return Verdict("a question", status, 0.1, 0.2, "an answer")


@pytest.mark.parametrize(
    "statuses, whole",
    [
        ([PASS, PASS], PASS),
        ([PASS, INCONCLUSIVE], INCONCLUSIVE),
        ([INCONCLUSIVE, FAIL, PASS], FAIL),
        ([], INCONCLUSIVE),
    ],
)
def test_the_worst_answer_counts_and_no_answer_is_no_pass(statuses: list, whole: str) -> None:
    assert overall(made(status) for status in statuses) == whole


def test_a_verdict_is_strict_json_whatever_its_number() -> None:
    for number in (None, math.nan, math.inf):
        plain = Verdict("a question", FAIL, number, 0.2, "an answer").as_dict()
        assert json.loads(json.dumps(plain, allow_nan=False))["number"] is None
    assert made(PASS).as_dict()["number"] == 0.1


@pytest.mark.parametrize("power", [-1.0, -0.5, 0.0, 0.75, 2.0])
def test_the_slope_of_a_power_of_the_width_is_the_power(power: float) -> None:
    widths = [32, 64, 96, 256]
    assert slope(widths, [3.0 * width**power for width in widths]) == pytest.approx(power, abs=1e-12)


def test_the_slope_of_scattered_values_is_numpys_fit() -> None:
    widths = np.array([64, 128, 256, 512])
    values = np.array([1.0, 1.3, 0.7, 2.0])
    assert slope(list(widths), list(values)) == pytest.approx(np.polyfit(np.log2(widths), np.log2(values), 1)[0], rel=1e-10)


@pytest.mark.parametrize("values", [[1.0, 0.0], [1.0, math.nan], [1.0, math.inf], [1.0, -1.0]])
def test_there_is_no_slope_through_values_without_a_logarithm(values: list) -> None:
    assert slope([64, 128], values) is None
    assert slope([64, 64], [1.0, 2.0]) is None
