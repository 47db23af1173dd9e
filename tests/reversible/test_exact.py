"""Exact streams: inverting gives back every bit, gradients are those of plain autograd bit for bit, and the range is watched."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from ipu_lean.errors import ConfigError, RunError
from ipu_lean.reversible import ReversibleBlock, ReversibleStack, make_coupling
from ipu_lean.reversible.exact import range_of, to_grid
from tests.reversible.toys import Attention, FeedForward, assert_same, data, error, gradients

pytestmark = pytest.mark.pod
WIDTH = 8


class Tanh(nn.Module):
    """A branch that is quick, so that many seeds and layers are."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        return torch.tanh(x @ self.weight)


def stack_of(layers, bits, make=Tanh, **options):
    coupling = make_coupling("additive", exact_bits=bits)
    return ReversibleStack([ReversibleBlock([make(), make()], coupling) for _ in range(layers)], **options)


@pytest.mark.parametrize(("layers", "bits"), [(12, 14), (48, 12), (192, 14)])
def test_nothing_is_lost_over_a_hundred_seeds(layers, bits):
    plain = 0.0
    for seed in range(100):
        torch.manual_seed(seed)
        stack = stack_of(layers, bits)
        a0, b0 = stack.enter(torch.randn(2, 3, WIDTH) * 3)
        with torch.no_grad():
            a, b = stack.inverse(*stack.run(a0, b0))
            assert torch.equal(a, a0) and torch.equal(b, b0), seed
            if seed < 5:
                blocks = [ReversibleBlock(list(block.branches)) for block in stack.blocks]
                other = ReversibleStack(blocks)
                plain = max(plain, error(a0, other.inverse(*other.run(a0, b0))[0]))
    assert plain > 1e-8, "without the grid something is"


def made(engine, dtype=torch.float32, layers=6, bits=14):
    torch.manual_seed(0)
    coupling = make_coupling("additive", exact_bits=bits)
    blocks = [ReversibleBlock([Attention(0.1), FeedForward(0.1)], coupling) for _ in range(layers)]
    return ReversibleStack(blocks, engine=engine).to(dtype)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_gradients_are_bit_for_bit_those_of_store(autocast):
    """With bfloat16 branches too: the second run reads the very inputs of the first."""
    reference = gradients(made("store"), data(torch.float32).requires_grad_(), autocast)
    found = gradients(made("invert"), data(torch.float32).requires_grad_(), autocast)
    assert set(reference) == set(found)
    for name, gradient in reference.items():
        assert gradient.norm() > 0 and torch.equal(gradient, found[name]), name


def test_the_gradient_is_that_of_no_rounding():
    """Straight through: on a grid as fine as double precision nearly allows, it is the plain stack's to that precision."""
    torch.manual_seed(0)
    blocks = [ReversibleBlock([Attention(), FeedForward()]) for _ in range(3)]
    plain = ReversibleStack(blocks, engine="store").double()
    gridded = ReversibleStack([ReversibleBlock(list(b.branches), make_coupling("additive", exact_bits=22)) for b in blocks])
    gridded.engine = "store"
    reference = gradients(plain)
    plain.zero_grad()
    assert_same(reference, gradients(gridded), 1e-5)


def test_the_grid():
    x = torch.tensor([0.3, -1.26, 0.0, 0.124, 100.1, -0.126])
    assert to_grid(x, 2).tolist() == [0.25, -1.25, 0.0, 0.0, 100.0, -0.25]
    x = torch.randn(1000).mul(50).requires_grad_()
    y = to_grid(x, 14)
    assert torch.equal(y * 2**14, (y * 2**14).round()) and (y - x).abs().max() <= 2.0**-15
    assert torch.equal(to_grid(y.detach(), 14), y)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(1000))
    assert to_grid(torch.randn(3, dtype=torch.bfloat16), 14).dtype == torch.float32
    assert (range_of(torch.float32, 14), range_of(torch.float32, 12), range_of(torch.float64, 22)) == (1024, 4096, 2.0**31)


@pytest.mark.parametrize("engine", ["invert", "store", "checkpoint"])
def test_a_stream_out_of_range_is_an_error(engine):
    class Grows(nn.Module):
        def forward(self, x):
            return x * 3

    streams = [1e-3, 1e-3]
    while streams[-1] < 1024:
        streams.append(streams[-2] + 3 * streams[-1])
    first = len(streams) - 3
    stack = stack_of(6, 14, Grows, engine=engine)
    with pytest.raises(RunError, match=f"half-step {first} .*exact_bits: 14.* below 1024.*Set it to 12 or less"):
        stack(torch.ones(1, 1, 4) * 1e-3)
    with pytest.raises(RunError, match="input reached 2000"):
        stack(torch.full((1, 1, 4), 2000.0))
    coarser = stack_of(6, 8, Grows, engine=engine)
    assert torch.isfinite(coarser(torch.ones(1, 1, 4) * 4e-3)).all(), "a coarser grid reaches farther"


def test_only_additive_streams_have_a_grid():
    for name in ("momentum", "modified-momentum", "mean", "affine"):
        with pytest.raises(ConfigError, match="model.stack.exact"):
            make_coupling(name, exact_bits=14)
    for bits in (0, 23):
        with pytest.raises(ConfigError, match="model.stack.exact_bits"):
            make_coupling("additive", exact_bits=bits)
