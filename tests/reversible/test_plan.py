"""Parts of a stack with engines of their own."""
from __future__ import annotations

import pytest

from benchmarks._common import LiveBytes, parameters_and_gradients
from ipu_lean._compat import TORCH
from ipu_lean.errors import ConfigError
from ipu_lean.reversible import Segment
from tests.reversible.toys import assert_same, data, gradients, loss_of, residual, reversible

pytestmark = pytest.mark.pod
counts_bytes = pytest.mark.skipif(TORCH < (2, 1), reason="storages have no lasting Python object before torch 2.1")
MIXED = [
    [("invert", 3), ("store", 1)],
    [("checkpoint", 2), ("invert", 2)],
    [("store", 1), ("invert", 1), ("checkpoint", 2)],
    [("invert", 2), ("invert", 2)],
]


def parts(mixed):
    return [Segment(layers, engine, 2 if engine == "checkpoint" else 1) for engine, layers in mixed]


@pytest.mark.parametrize("mixed", MIXED)
@pytest.mark.parametrize("options", [{}, {"dropout": 0.3}, {"visits": [0, 1, 1, 0]}, {"output": "y"}])
def test_gradients(mixed, options):
    options = {"layers": 4, **options}
    found = gradients(reversible("invert", segments=parts(mixed), **options))
    assert_same(gradients(reversible("store", **options)), found, 1e-10)


def test_residual_stacks_have_them_too():
    found = residual("store", layers=4, dropout=0.2, segments=[Segment(3, "checkpoint", 2), Segment(1, "store")])
    assert_same(gradients(residual("store", layers=4, dropout=0.2)), gradients(found), 1e-10)


def test_order_aaff():
    segments = [Segment(2, "invert"), Segment(2, "store")]
    options = {"layers": 4, "order": "aaff"}
    assert_same(gradients(reversible("store", **options)), gradients(reversible("invert", segments=segments, **options)), 1e-10)


@pytest.mark.parametrize(
    ("segments", "options", "words"),
    [
        ([Segment(2, "invert")], {"layers": 4}, "have 2 layers and the stack has 4"),
        ([Segment(1, "invert"), Segment(3, "store")], {"layers": 4, "order": "aaff"}, "would be cut"),
        ([Segment(4, "keep")], {"layers": 4}, "runs with one of"),
        ([Segment(2, "store"), Segment(0, "invert"), Segment(2, "store")], {"layers": 4}, "must be at least 1"),
    ],
)
def test_refused(segments, options, words):
    with pytest.raises(ConfigError, match=words):
        reversible("invert", segments=segments, **options)(data())


def test_a_residual_segment_cannot_be_inverted():
    with pytest.raises(ConfigError, match="runs with one of"):
        residual("store", segments=[Segment(3, "invert")])


def test_setting_the_engine_gives_up_segments():
    stack = reversible("invert", layers=4, segments=parts(MIXED[0]))
    assert stack.engine == "segments"
    stack.engine = "store"
    assert stack.engine == "store" and stack.keeps_everything()


@counts_bytes
def test_each_kept_layer_costs_one_layer_and_saves_its_second_run():
    def step(kept):
        segments = [Segment(8 - kept, "invert")] + ([Segment(kept, "store")] if kept else [])
        stack = reversible("invert", layers=8, segments=segments)
        with LiveBytes(parameters_and_gradients(stack)) as live:
            loss_of(stack(data())).backward()
        return live.peak, sum(block.branches[0].calls for block in stack.executed())

    whole = reversible("store", layers=8)
    with LiveBytes(parameters_and_gradients(whole)) as live:
        loss_of(whole(data())).backward()
    (peak0, runs0), (peak2, runs2), (peak4, runs4) = step(0), step(2), step(4)
    assert (runs0, runs2, runs4) == (16, 14, 12)
    assert peak0 < peak2 < peak4 < live.peak
    assert abs((peak4 - peak2) - live.peak * 2 / 8) < live.peak / 8
