"""Gradients of every allowed coupling, order, input and output: the inverting engine gives those of plain autograd."""
from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.reversible import COUPLINGS, GATES, INPUTS, OUTPUTS, ReversibleBlock, ReversibleStack, make_coupling
from ipu_lean.reversible.streams import check_pair
from tests.reversible.toys import assert_same, collect, loss_of

pytestmark = pytest.mark.pod
WIDTH = 4
NAMES = [(name, {}) for name in COUPLINGS] + [("mean", {"index": "global"})]
KINDS = list(itertools.product(NAMES, INPUTS, (*OUTPUTS, *GATES)))


class Mixer(nn.Module):
    """A branch that mixes tokens, as attention does, or features; a norm first, so that streams of any size are welcome."""

    def __init__(self, tokens: bool, widening: int) -> None:
        super().__init__()
        self.norm, self.tokens = nn.LayerNorm(WIDTH), tokens
        self.linear = nn.Linear(WIDTH, widening * WIDTH)

    def forward(self, x):
        z = self.norm(x)
        z = z.cumsum(1) * 0.5 if self.tokens else z
        return torch.tanh(self.linear(z))


def build(engine, coupling, options, input, output, layers, order="attn-ffn"):
    torch.manual_seed(0)
    made = make_coupling(coupling, **options)
    kinds = [True, True, False, False] if order == "aaff" else [True, False]
    blocks = [ReversibleBlock([Mixer(k, made.widening) for k in kinds], made) for _ in range(2 * layers // len(kinds))]
    stack = ReversibleStack(blocks, input=input, output=output, engine=engine, width=WIDTH).double()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)  # the gate and the norms too
    return stack


def one_step(stack, input, needs_grad=True):
    generator = torch.Generator().manual_seed(1)
    wide = 2 * WIDTH if input == "split" else WIDTH
    x = torch.randn(2, 3, wide, generator=generator, dtype=torch.float64).requires_grad_(needs_grad)
    y = stack(x)
    loss_of(y).backward()
    return (collect(stack, x=x) if needs_grad else collect(stack)), y.detach()


def allowed(coupling, input, output):
    try:
        check_pair(coupling, input, output)
    except ConfigError:
        return False
    # Zeros through the first norm are the ill-conditioned input: the configuration refuses it, and its gradient is no test.
    return input != "zeros-read"


@pytest.mark.parametrize(("kind", "input", "output"), KINDS)
def test_gradients(kind, input, output):
    (coupling, options) = kind
    if not allowed(coupling, input, output):
        if output == "sum-minus-input":
            with pytest.raises(ConfigError, match="model.stack.output"):
                build("invert", coupling, options, input, output, 2)
        return
    for layers, order in ((2, "aaff"), (4, "attn-ffn")):
        reference, expected = one_step(build("store", coupling, options, input, output, layers, order), input)
        found, y = one_step(build("invert", coupling, options, input, output, layers, order), input)
        assert torch.equal(y, expected)
        named = {name: g for name, g in reference.items() if g.norm() > 1e-12}
        assert len(named) >= len(reference) - 4 and set(found) == set(reference)
        assert_same(named, {name: found[name] for name in named}, 1e-9)


@pytest.mark.parametrize(("coupling", "options"), NAMES)
@pytest.mark.parametrize("order", ["attn-ffn", "aaff"])
def test_deep(coupling, options, order):
    output = "sum" if coupling != "modified-momentum" else "x"
    reference, _ = one_step(build("store", coupling, options, "duplicate", output, 24, order), "duplicate", needs_grad=False)
    found, _ = one_step(build("invert", coupling, options, "duplicate", output, 24, order), "duplicate", needs_grad=False)
    named = {name: g for name, g in reference.items() if g.norm() > 1e-12}
    assert len(named) > 150
    assert_same(named, {name: found[name] for name in named}, 1e-9)
