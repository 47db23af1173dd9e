"""Branches in pieces: gradients, memory and runs, against the same branches undivided."""
from __future__ import annotations

import gc

import pytest
import torch

from benchmarks._common import LiveBytes, parameters_and_gradients
from ipu_lean._compat import TORCH
from ipu_lean.reversible import ReversibleBlock, ReversibleStack, Segment
from tests.reversible.toys import BATCH, INNER, SEQ, WIDTH, Attention, Wide, assert_same, collect, data, gradients, loss_of

pytestmark = pytest.mark.pod
counts_bytes = pytest.mark.skipif(TORCH < (2, 1), reason="storages have no lasting Python object before torch 2.1")
ENGINES = ["store", "invert", "checkpoint"]


def stack(engine, pieces=1, sums=False, layers=3, dropout=0.0, visits=None, dtype=torch.float64, coupling="additive", **options):
    torch.manual_seed(0)
    blocks = [ReversibleBlock([Attention(), Wide(pieces, sums, dropout, **options)], coupling) for _ in range(layers)]
    output = "x" if "momentum" in coupling else "sum"
    order = blocks if visits is None else [blocks[i] for i in visits]
    return ReversibleStack(order, engine=engine, input="duplicate", output=output).to(dtype)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sums", [False, True])
@pytest.mark.parametrize("options", [{}, {"after": True}, {"visits": [0, 1, 1, 0]}, {"coupling": "momentum"}, {"layers": 1}])
def test_gradients_are_those_of_the_whole(engine, sums, options):
    reference = gradients(stack("store", **options))
    for pieces in (2, 4):
        assert_same(reference, gradients(stack(engine, pieces, sums, **options)), 1e-10)


@pytest.mark.parametrize("engine", ENGINES)
def test_random_numbers_and_decisions_inside_pieces_are_replayed(engine):
    """Both draw inside each piece, so the reference has the same pieces, under plain autograd."""
    options = {"dropout": 0.3, "decide": True, "after": True}
    plain = stack("store", 3, True, **options)
    torch.manual_seed(7)
    x = data().requires_grad_()
    branches = [branch for block in plain.executed() for branch in block.branches]
    a = b = x
    for branch in branches:
        given = branch if isinstance(branch, Attention) else plainly(branch)
        a, b = b, a + given(b)
    loss_of(a + b).backward()
    after = torch.get_rng_state()
    recorded = stack(engine, 3, True, **options)
    assert_same(collect(plain, x=x), gradients(recorded), 1e-10)
    assert torch.equal(after, torch.get_rng_state())


def plainly(branch):
    def run(x):
        return branch.last(sum(branch.piece(i, n) for i, (n,) in enumerate(branch.begin(x))))

    return run


@pytest.mark.parametrize("engine", ENGINES)
def test_a_keyword_argument_reaches_every_piece_and_gets_its_gradient(engine):
    found = []
    for kind, pieces in (("store", 1), (engine, 3)):
        gain = torch.full((1,), 0.7, dtype=torch.float64, requires_grad=True)
        grads = gradients(stack(kind, pieces, True), gain=gain)
        found.append({**grads, "gain": gain.grad})
    assert_same(found[0], found[1], 1e-10)


@pytest.mark.parametrize(("engine", "runs"), [("store", 2), ("invert", 2), ("checkpoint", 2)])
def test_each_piece_runs_twice(engine, runs):
    """Also where the branch is the last of a checkpointed segment: its second run ends before the pieces."""
    found = stack(engine, 4)
    gradients(found)
    assert [block.branches[1].runs for block in found.executed()] == [4 * runs] * 3


def test_what_follows_the_pieces_costs_a_third_run():
    found = stack("invert", 4, after=True, layers=4)
    gradients(found)
    assert found.executed()[1].branches[1].runs == 12


@pytest.mark.parametrize("sums", [False, True])
def test_bf16_autocast_is_that_of_the_first_run(sums):
    """Checkpoints are bit-equal to kept inputs; rebuilt ones differ by a float32 rounding, which may change a bfloat16."""
    kept, again = (gradients(stack(e, 3, sums, dtype=torch.float32), autocast=torch.bfloat16) for e in ("store", "checkpoint"))
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    assert_same(kept, gradients(stack("invert", 3, sums, dtype=torch.float32), autocast=torch.bfloat16), 1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_two_backward_passes(engine):
    reference, found = stack("store"), stack(engine, 3)
    for kind in (reference, found):
        x = data().requires_grad_()
        y = loss_of(kind(x))
        y.backward(retain_graph=True)
        y.backward()
        kind.seen = collect(kind, x=x)
    assert_same(reference.seen, found.seen, 1e-10)


@pytest.mark.parametrize("engine", ENGINES)
def test_gradients_of_some_parameters_only(engine):
    """torch.autograd.grad for one early parameter: later pieces are run for the streams alone."""
    found = []
    for kind, pieces in (("store", 1), (engine, 3)):
        model = stack(kind, pieces, True)
        for branch in (block.branches[1] for block in model.executed()[1:]):
            branch.requires_grad_(False)
        found.append(torch.autograd.grad(loss_of(model(data())), [model.blocks[0].branches[0].out.weight])[0])
    assert (found[0] - found[1]).norm() <= 1e-10 * found[0].norm()


@counts_bytes
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("sums", [False, True])
def test_memory(engine, sums):
    """The wide middle is never whole, and nothing is left."""
    x = torch.randn(BATCH, 20 * SEQ, WIDTH, dtype=torch.float64)

    def peak(pieces):
        torch.manual_seed(0)
        blocks = [ReversibleBlock([Wide(pieces, sums), Wide(pieces, sums)]) for _ in range(4)]
        model = ReversibleStack(blocks, engine=engine).double()
        with LiveBytes([*parameters_and_gradients(model), x]) as live:
            gc.disable()
            loss_of(model(x)).backward()
            gc.enable()
            assert live.now == 0
        return live.peak

    middle = x.numel() // WIDTH * INNER * 8
    assert peak(1) - peak(4) > 1.5 * middle


@counts_bytes
def test_inverted_memory_does_not_depend_on_depth():
    peaks = []
    for layers in (4, 12):
        model = stack("invert", 4, layers=layers)
        with LiveBytes(parameters_and_gradients(model)) as live:
            loss_of(model(data())).backward()
        peaks.append(live.peak)
    assert peaks[0] == peaks[1]


def test_without_gradients_the_pieces_follow_each_other():
    model = stack("invert", 3).eval()
    with torch.no_grad():
        assert torch.allclose(model(data()), stack("store").eval()(data()), rtol=1e-12)


def test_under_torch_func():
    model = stack("invert", 3)
    parameters = dict(model.named_parameters())
    found = torch.func.grad(lambda p: loss_of(torch.func.functional_call(model, p, (data(),))))(parameters)
    reference = gradients(stack("store"))
    reference.pop("x")
    assert_same(reference, {name: found[name] for name in reference}, 1e-10)


def test_segments_take_pieces_too():
    parts = [Segment(1, "checkpoint"), Segment(1, "invert"), Segment(1, "store")]
    found = stack("invert", 3)
    found.segments = parts
    assert_same(gradients(stack("store")), gradients(found), 1e-10)
