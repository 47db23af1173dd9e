"""Errors of the device in words that help, and signs of life while it compiles."""

from __future__ import annotations

import threading
from typing import List

import pytest

from ipu_lean.ipu import failures

pytestmark = pytest.mark.pod


def test_memory_errors_name_the_tile_and_the_levers_in_order() -> None:
    text = failures.explain("poplar::error:\n out of memory on tile 0: 812,345 bytes used, 638,976 available")
    assert "tile 0: 812,345 of 638,976 bytes" in text
    places = [text.index(word) for word in ("batch.micro", "recompute", "matmul_proportion", "offchip", "more IPUs", "model.seq")]
    assert places == sorted(places)


def test_other_errors_stay_as_they_are_on_one_line() -> None:
    assert failures.explain("first\n  second.") == "first second."
    assert len(failures.explain("x" * 5000)) < 700


def test_a_short_wait_says_what_it_does_and_no_more() -> None:
    said: List[str] = []
    with failures.waiting(said.append, "compiling"):
        pass
    assert said == ["compiling"]


def test_a_long_wait_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_FIRST", 0.01)
    monkeypatch.setattr(failures, "_NEXT", 0.01)
    said: List[str] = []
    twice = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) > 2:
            twice.set()

    with failures.waiting(say, "compiling"):
        assert twice.wait(30)
    assert said[1].startswith("still compiling after") and "executable_cache" in said[1]
