"""Lists and ranges of numbers as text."""

from __future__ import annotations

import math

import pytest

from ipu_lean.config.ranges import numbers, whole

pytestmark = pytest.mark.pod


@pytest.mark.parametrize(
    "text, expected",
    [
        ("32,64,128", [32, 64, 128]),
        ("[128, 32]", [32, 128]),
        ("3e-3", [3e-3]),
        ("2^-7, 2**-5", [2.0**-7, 2.0**-5]),
        ("32..256", [32, 64, 128, 256]),
        ("32..200", [32, 64, 128]),
        ("64..1024*4", [64, 256, 1024]),
        ("2^-3..2^-1", [0.125, 0.25, 0.5]),
        ("16, 32..64", [16, 32, 64]),
        ("1e-3..1e-1/3", [1e-3, 1e-2, 1e-1]),
        ("5..5", [5]),
    ],
)
def test_text_names_these_numbers(text, expected):
    assert numbers(text) == expected


def test_a_logarithmic_range_is_evenly_spaced_and_hits_powers_of_two_exactly():
    found = numbers("2^-10..2^-4/13")
    steps = [math.log2(b) - math.log2(a) for a, b in zip(found, found[1:])]
    assert len(found) == 13 and all(abs(step - 0.5) < 1e-9 for step in steps)
    assert found[::2] == [2.0**power for power in range(-10, -3)]


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "names no number"),
        ("fast", "positive number"),
        ("-3", "positive number"),
        ("4..2", "rise"),
        ("0..2", "rise"),
        ("2..", "no end"),
        ("1..8*1", "factor above 1"),
        ("1..1e300*1.0001", "at most"),
        ("1..8/1", "2 to"),
        ("2^99999", "positive number"),
        ("0^-1", "positive number"),
    ],
)
def test_other_text_is_refused_in_words(text, words):
    with pytest.raises(ValueError, match=words):
        numbers(text)


def test_whole_numbers_lose_their_point_and_others_stay():
    assert whole([32.0, 1.5, "x", float("inf")]) == [32, 1.5, "x", float("inf")]
    assert isinstance(whole([32.0])[0], int)
