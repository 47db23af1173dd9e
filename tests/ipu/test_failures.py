"""Errors of the device in words that help, and signs of life while it compiles."""

from __future__ import annotations

import threading
from typing import List

import pytest

from ipu_lean.ipu import failures
from ipu_lean.ipu.plan.advice import out_of_memory, plan_lines, warning
from tests.ipu.helpers import ipu_config

pytestmark = pytest.mark.pod


def test_memory_errors_name_the_tile_and_the_levers_in_order() -> None:
    text = failures.explain("poplar::error:\n out of memory on tile 0: 812,345 bytes used, 638,976 available")
    assert "tile 0: 812,345 of 638,976 bytes" in text
    places = [text.index(word) for word in ("batch.micro", "recompute", "matmul_proportion", "offchip", "more IPUs", "model.seq")]
    assert places == sorted(places)


def test_memory_errors_stand_beside_the_plan() -> None:
    said = failures.explain("out of memory on tile 0: 812,345 bytes used, 638,976 available", lambda: out_of_memory(ipu_config()))
    assert "The plan expected: fullest IPU 0, 0 % of its memory and 60 % with temporaries: fits." in said
    assert "Next lever: smaller micro-batches (batch.micro: 1, batch.accumulation: 10)." in said
    assert failures.explain("not supported", lambda: "never") == "not supported."


def test_other_errors_stay_as_they_are_on_one_line() -> None:
    assert failures.explain("first\n  second.") == "first second."
    assert len(failures.explain("x" * 5000)) < 700


def test_a_run_says_its_plan_and_warns_only_if_it_is_too_full() -> None:
    small = ipu_config()
    assert "F = 3 forward stages: accumulation >= 2F-1 = 5 (it is 5)" in plan_lines(small)[0]
    assert "verdict fits" in plan_lines(small)[1] and warning(small) is None
    wide = ipu_config(model={"width": 4096, "heads": 64, "depth": 8}, ipu={"layers_per_ipu": [4, 4]}, mup={"base_width": 128})
    assert "verdict no" in plan_lines(wide)[1]
    assert str(warning(wide)).startswith("warning: by estimate IPU ") and "would overflow; first lever: " in str(warning(wide))


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
