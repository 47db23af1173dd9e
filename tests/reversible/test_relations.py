"""What the couplings are to each other, and to revlib's."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from ipu_lean.reversible import ReversibleBlock, ReversibleStack, make_coupling
from tests.reversible.toys import WIDTH, Attention, FeedForward, assert_same, collect, data, error, loss_of

pytestmark = pytest.mark.pod
BETA = 0.9


def blocks_of(coupling, layers, eps=1e-5, branches=None):
    torch.manual_seed(0)
    branches = branches or [[Attention(), FeedForward()] for _ in range(layers)]
    for pair in branches:
        for branch in pair:
            branch.norm.eps = eps
    return [ReversibleBlock(pair, coupling) for pair in branches]


def stack_of(coupling, layers, dtype=torch.float64, eps=1e-5, **options):
    return ReversibleStack(blocks_of(coupling, layers, eps), **options).to(dtype)


@pytest.mark.parametrize("engine", ["store", "invert"])
@pytest.mark.parametrize("layers", [3, 12])
def test_mean_is_additive_up_to_a_scale(engine, layers):
    """Each branch reads through a norm, which does not see that (i + 1) means are a sum. So neither do gradients."""
    x, final, found = data(), nn.LayerNorm(WIDTH, eps=1e-14).double(), []
    for coupling in (make_coupling("additive"), make_coupling("mean")):
        stack = stack_of(coupling, layers, eps=1e-14, output="concat", engine=engine)
        a, b = stack(x).chunk(2, -1)
        loss_of(torch.cat((final(a), final(b)), -1)).backward()
        found.append((a.detach(), b.detach(), collect(stack)))
    (a, b, reference), (mean_a, mean_b, gradients) = found
    assert error(a, mean_a * (layers + 1)) < 1e-9 and error(b, mean_b * (layers + 1)) < 1e-9
    assert error(a, mean_a) > 0.5
    assert_same(reference, gradients, 1e-6)


def test_mean_with_the_global_index_is_another_network():
    x, found = data(), []
    for index in ("stream", "global"):
        stack = stack_of(make_coupling("mean", index=index), 12, eps=1e-14, output="mean")
        found.append(nn.functional.layer_norm(stack(x), (WIDTH,)).detach())
    assert error(*found) > 0.1


@pytest.mark.parametrize("engine", ["store", "invert"])
def test_modified_momentum_is_momentum_in_other_coordinates(engine):
    """A = x + beta / (1 - beta) v and B = beta^-n x; both streams equal at the start means no velocity."""
    layers = 6
    plain = stack_of(make_coupling("momentum", BETA), layers, input="zeros", output="concat", engine=engine)
    other = stack_of(make_coupling("modified-momentum", BETA), layers, input="duplicate", output="concat", engine=engine)
    position, velocity = plain(data()).chunk(2, -1)
    a, b = other(data()).chunk(2, -1)
    n = 2 * layers
    assert error(position + BETA / (1 - BETA) * velocity, a) < 1e-12
    assert error(position, b * BETA**n) < 1e-12 and error(b, position) > 0.5
    loss_of(position).backward()
    loss_of(b * BETA**n).backward()
    assert_same(collect(plain), collect(other), 1e-9)


def test_what_the_streams_of_modified_momentum_are():
    """A is the embedding and the plain sum of all branch outputs; momentum's x has each damped by what has passed since."""

    class Constant(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.value = value

        def forward(self, x):
            return torch.full_like(x, self.value)

    values = [1.0, 10.0, 100.0, 1000.0]
    x0, found = torch.full((1, 1, 1), 0.5), {}
    for name, kind in (("momentum", "zeros"), ("modified-momentum", "duplicate")):
        coupling = make_coupling(name, BETA)
        stack = ReversibleStack([ReversibleBlock([Constant(v) for v in values], coupling)], input=kind, output="x")
        found[name] = stack(x0).item()
    assert found["modified-momentum"] == pytest.approx(0.5 + sum(values))
    damped = sum(v * (1 - BETA ** (len(values) - i)) for i, v in enumerate(values))
    assert found["momentum"] == pytest.approx(0.5 + damped)


def by_revlib(kind, branches, x):
    """revlib's stack over the same modules; its two streams are the halves of the last dimension."""
    revlib = pytest.importorskip("revlib")
    flat = [branch for pair in branches for branch in pair]
    if kind == "modified-momentum":
        net = pytest.importorskip("revlib.utils").momentum_net(*flat, split_dim=-1, beta=BETA)
        return net(torch.cat((x, x), -1)).chunk(2, -1)
    if kind == "momentum":  # the pair of couplings in revlib's README, with its streams (v, x)
        steps = [module for branch in flat for module in (branch, nn.Identity())]
        net = revlib.ReversibleSequential(
            *steps,
            split_dim=-1,
            coupling_forward=[lambda v, f: v * BETA + f * (1 - BETA), revlib.additive_coupling_forward],
            coupling_inverse=[lambda v, f: (v - f * (1 - BETA)) / BETA, revlib.additive_coupling_inverse],
            # Its memory-saving function applies the coupling to gradients too, which is right for additive ones only.
            memory_mode=revlib.MemoryModes.no_savings,
        )
        v, position = net(torch.cat((torch.zeros_like(x), x), -1)).chunk(2, -1)
        return position, v
    return revlib.ReversibleSequential(*flat, split_dim=-1)(torch.cat((x, x), -1)).chunk(2, -1)


@pytest.mark.parametrize("kind", ["additive", "momentum", "modified-momentum"])
def test_revlib_from_the_same_weights(kind):
    coupling = make_coupling(kind) if kind == "additive" else make_coupling(kind, BETA)
    start = "zeros" if kind == "momentum" else "duplicate"
    ours = ReversibleStack(blocks_of(coupling, 4), input=start, output="concat")
    theirs = ReversibleStack(blocks_of(coupling, 4), input=start, output="concat")
    x, x_theirs = (data(torch.float32).requires_grad_() for _ in range(2))
    a, b = ours(x).chunk(2, -1)
    loss_of(torch.cat((a, b), -1)).backward()
    c, d = by_revlib(kind, [list(block.branches) for block in theirs.blocks], x_theirs)
    loss_of(torch.cat((c, d), -1)).backward()
    assert error(c, a) < 1e-5 and error(d, b) < 1e-5
    assert_same(collect(theirs, x=x_theirs), collect(ours, x=x), 1e-5)
