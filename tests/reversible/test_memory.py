"""What is alive, counted in bytes of tensor storage."""
from __future__ import annotations

import gc
import weakref

import pytest
import torch

from benchmarks._common import LiveBytes, parameters_and_gradients
from ipu_lean._compat import TORCH
from ipu_lean.reversible import engine as engine_module
from tests.reversible.test_every_coupling import build
from tests.reversible.toys import BATCH, SEQ, WIDTH, data, loss_of, residual, reversible

counts_bytes = pytest.mark.skipif(TORCH < (2, 1), reason="storages have no lasting Python object before torch 2.1")
STREAM = BATCH * SEQ * WIDTH * 8
MOMENTUM = {"coupling": "momentum", "input": "zeros", "output": "gate"}
MODIFIED = {"coupling": "modified-momentum", "output": "x"}
MEAN = {"coupling": "mean", "output": "mean"}


def step_bytes(stack, needs_grad=True, autocast=False):
    """(alive after forward, peak of the step, alive after backward) in bytes."""
    x = data(torch.float32 if autocast else torch.float64).requires_grad_(needs_grad)
    x.grad = torch.zeros_like(x) if needs_grad else None
    ignore = parameters_and_gradients(stack) + [t for t in (x, x.grad) if t is not None]
    with LiveBytes(ignore) as live:
        with torch.autocast("cpu", enabled=autocast):
            y = stack(x)
        loss = loss_of(y)
        del y
        after_forward = live.now
        loss.backward()
        del loss
        return after_forward, live.peak, live.now


@pytest.fixture(scope="module", autouse=True)
def _torch_is_warm():
    """What torch imports in a process's first backward pass holds frames, and with them tensors, until the collector runs."""
    loss_of(reversible("invert")(data())).backward()
    gc.collect()


@counts_bytes
@pytest.mark.parametrize("engine", ["invert", "checkpoint", "store"])
@pytest.mark.parametrize(
    "options", [{}, {"dropout": 0.3}, {"order": "aaff"}, {"output": "x"}, {"visits": [0, 1, 1, 0]}, MOMENTUM]
)
def test_nothing_is_left_after_backward(engine, options):
    gc.disable()
    try:
        assert step_bytes(reversible(engine, layers=4, **options))[2] == 0
        assert step_bytes(reversible(engine, layers=4, **options), needs_grad=False)[2] == 0
    finally:
        gc.enable()


@counts_bytes
def test_nothing_is_left_after_a_dropped_forward():
    stack = reversible("invert", dropout=0.3)
    gc.disable()
    try:
        with LiveBytes(parameters_and_gradients(stack)) as live:
            y = stack(data())
            held = live.now
            del y
            assert held > 0 and live.now == 0
    finally:
        gc.enable()


@counts_bytes
@pytest.mark.parametrize("options", [{}, {"dropout": 0.3}, {"order": "aaff"}, {"output": "y"}, MOMENTUM, MODIFIED, MEAN])
def test_inverted_memory_does_not_depend_on_depth(options):
    peaks = [step_bytes(reversible("invert", layers=layers, **options)) for layers in (4, 8, 16)]
    after = [found[0] for found in peaks]
    random_states = 5056 * 2 * 16 if "dropout" in options else 0
    assert after[2] - after[0] <= random_states
    assert peaks[2][1] - peaks[0][1] <= random_states
    plain = [step_bytes(reversible("store", layers=layers, **options))[1] for layers in (4, 16)]
    assert plain[1] > 3 * plain[0]


@counts_bytes
def test_a_coupling_that_saves_tensors_does_not_keep_them():
    """The affine coupling multiplies: its factors are recorded together with the branch, and rebuilt with it."""
    peaks = []
    for layers in (4, 8, 16):
        stack, x = build("invert", "affine", {}, "duplicate", "mean", layers), torch.randn(2, 3, 4, dtype=torch.float64)
        for parameter in stack.parameters():
            parameter.grad = torch.zeros_like(parameter)
        gc.disable()
        try:
            with LiveBytes([*parameters_and_gradients(stack), x]) as live:
                loss_of(stack(x)).backward()
                assert live.now == 0
        finally:
            gc.enable()
        peaks.append(live.peak)
    assert peaks[0] == peaks[1] == peaks[2]


@counts_bytes
def test_autocast_keeps_no_second_copy_of_the_weights():
    """The cache of casts would hold a 16-bit copy of every layer until the end of the forward pass."""
    found = [step_bytes(reversible("invert", layers=layers, dtype=torch.float32), autocast=True)[1] for layers in (4, 16)]
    assert found[0] == found[1]


@counts_bytes
def test_after_forward_only_the_two_streams_and_the_loss_are_kept():
    held = step_bytes(reversible("invert", layers=8))[0]
    loss_keeps = 2 * STREAM + 16  # its random weights and the stack's output, and two numbers
    assert held <= 2 * STREAM + loss_keeps + 64


@counts_bytes
@pytest.mark.parametrize("stack", [reversible, residual])
def test_checkpoints_lie_between(stack):
    plain = step_bytes(stack("store", layers=8))[1]
    every = {n: step_bytes(stack("checkpoint", layers=8, checkpoint_every=n))[1] for n in (1, 2, 8)}
    assert every[1] < every[2] < every[8] <= plain * 1.05
    assert every[1] < 0.5 * plain


@pytest.mark.pod
@pytest.mark.parametrize("engine", ["invert", "checkpoint"])
def test_frames_end_with_the_graph(engine, monkeypatch):
    """Works on every torch: no frame outlives the backward pass, and none needs the garbage collector."""
    kind = engine_module.InvertedFrame if engine == "invert" else engine_module.SegmentFrame
    frames = []
    original = kind.record

    def record(self, *inputs):
        frames.append(weakref.ref(self))
        return original(self, *inputs)

    monkeypatch.setattr(kind, "record", record)
    gc.disable()
    try:
        stack = reversible(engine, dropout=0.2)
        loss = loss_of(stack(data()))
        assert frames and any(frame() is not None for frame in frames)
        loss.backward()
        assert all(frame() is None for frame in frames)
    finally:
        gc.enable()


@pytest.mark.pod
def test_frames_end_one_by_one(monkeypatch):
    """In a backward pass that frees its graph, a frame and the streams behind it are gone before the one before it runs."""
    alive = []
    original = engine_module.InvertedFrame.rerun
    frames = weakref.WeakSet()

    def rerun(self, executing):
        frames.add(self)
        alive.append(len(frames))
        return original(self, executing)

    monkeypatch.setattr(engine_module.InvertedFrame, "rerun", rerun)
    loss_of(reversible("invert", layers=4)(data())).backward()
    assert alive == [1] * 8
