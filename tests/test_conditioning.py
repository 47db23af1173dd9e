"""What is predicted of a stack's conditioning, beside closed forms and beside what inverting it really does."""
from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from ipu_lean.conditioning import BFLOAT16, SINGLE, Stack, amplification, gradient_error, half_step, tolerance
from ipu_lean.reversible import ReversibleBlock, ReversibleStack, make_coupling

pytestmark = pytest.mark.pod
WIDTH = 32


def test_closed_forms():
    assert amplification(Stack("additive", 48)) == 1
    assert amplification(Stack("momentum", 48, beta=0.9)) == pytest.approx(157.17, rel=1e-4)
    assert amplification(Stack("modified-momentum", 96, beta=0.9)) == pytest.approx(24701, rel=1e-4)
    assert amplification(Stack("momentum", 48, beta=0.5)) == pytest.approx(2.0**48)
    assert amplification(Stack("mean", 48)) == pytest.approx(25), "one more than what each stream received"
    assert amplification(Stack("mean", 48, index="global")) == pytest.approx(8.7, abs=0.1)
    assert amplification(Stack("affine", 48)) == pytest.approx((1 / 0.8808) ** 24, rel=1e-3)
    assert amplification(Stack("momentum", 100000, beta=0.5)) > 1e200, "no overflow"
    assert gradient_error(Stack("momentum", 10000, beta=0.5)) == math.inf
    assert gradient_error(Stack("additive", 2)) == 0.0, "both half-steps have their inputs kept"


@pytest.mark.parametrize(
    ("name", "options"), [("additive", {}), ("mean", {}), ("mean", {"index": "global"}), ("momentum", {"beta": 0.8})]
)
def test_half_steps_are_those_of_the_couplings(name, options):
    coupling = make_coupling(name, **options)
    for step in (0, 3, 8):
        found = half_step(Stack(name, 20, **options), step)
        a, b, f = torch.tensor(2.0), torch.tensor(-3.0), torch.tensor(5.0)
        after = coupling.forward(a, b, f, step)
        for i in (0, 1):
            assert found.m[i][0] * 2 - found.m[i][1] * 3 + found.g[i] * 5 == pytest.approx(after[i].item(), rel=1e-6)
        read = coupling.read(a, b, step).item()
        assert found.r[0] * 2 - found.r[1] * 3 == pytest.approx(read)
        assert found.q[0] * after[0].item() + found.q[1] * after[1].item() == pytest.approx(read, rel=1e-5)


def test_modified_momentum_is_momentum_in_other_coordinates():
    """(A, X) with A = x + beta / (1 - beta) v and X = x, by the change of variables."""
    beta = 0.8
    plain, other = half_step(Stack("momentum", 9, beta=beta), 2), half_step(Stack("modified-momentum", 9, beta=beta), 2)
    to = torch.tensor([[1.0, beta / (1 - beta)], [1.0, 0.0]], dtype=torch.float64)
    m, g = (torch.tensor(t, dtype=torch.float64) for t in (plain.m, plain.g))
    assert torch.allclose(to @ m @ torch.linalg.inv(to), torch.tensor(other.m, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(to @ g, torch.tensor(other.g, dtype=torch.float64), atol=1e-12)


class Branch(nn.Module):
    """A norm, two matrices and a non-linearity; its output has about unit size."""

    def __init__(self, widening):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, widening * WIDTH)
        with torch.no_grad():
            self.up.weight.normal_(0, WIDTH**-0.5)
            self.down.weight.normal_(0, 1.6 * WIDTH**-0.5)
            if widening == 2:
                self.down.weight[:WIDTH] = 0  # the affine scale begins at zero, as in our models

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


def measured(name, layers, options, input):
    """Largest relative gradient error of inverting, float32, and the size of a branch's output."""
    coupling = make_coupling(name, **options)
    torch.manual_seed(0)
    blocks = [ReversibleBlock([Branch(coupling.widening), Branch(coupling.widening)], coupling) for _ in range(layers)]
    x, target = torch.randn(16, WIDTH), torch.randn(16, WIDTH)
    found, size = [], []
    for engine in ("store", "invert"):
        stack = ReversibleStack(blocks, input=input, output="sum", engine=engine)
        y = stack(x)
        gradients = torch.autograd.grad((nn.functional.layer_norm(y, (WIDTH,)) * target).mean(), list(stack.parameters()))
        found.append([g for g, (n, _) in zip(gradients, stack.named_parameters()) if n.endswith("up.weight")])
    with torch.no_grad():
        size = blocks[0].branches[0](x)[..., -WIDTH:].pow(2).mean().sqrt().item()
    return max(((u - v).norm() / u.norm()).item() for u, v in zip(*found)), size


CASES = [
    ("additive", {}, 48, "duplicate"),
    ("additive", {}, 24, "zeros"),
    ("mean", {}, 48, "duplicate"),
    ("momentum", {"beta": 0.9}, 12, "zeros"),
    ("momentum", {"beta": 0.9}, 24, "zeros"),
    ("momentum", {"beta": 0.7}, 12, "zeros"),
    ("modified-momentum", {"beta": 0.9}, 24, "duplicate"),
    ("affine", {}, 24, "duplicate"),
    ("affine", {}, 36, "duplicate"),
]


@pytest.mark.parametrize(("name", "options", "layers", "input"), CASES, ids=lambda v: str(v))
def test_predicted_is_measured_within_a_factor(name, options, layers, input):
    error, size = measured(name, layers, options, input)
    predicted = gradient_error(Stack(name, 2 * layers, input=input, branch=size, **options))
    assert predicted / 8 < error < predicted * 8, f"measured {error:.1e}, predicted {predicted:.1e}"


def test_what_is_tolerated():
    """In 16 bits, what an additive stack of the same depth has to bear is no reason to refuse another coupling."""
    deep = Stack("momentum", 48, beta=0.9, input="zeros")
    assert tolerance(deep) == 1e-3
    assert tolerance(deep, BFLOAT16) == 2 * gradient_error(replace(deep, coupling="additive", beta=None), BFLOAT16) > 2 * BFLOAT16
    assert tolerance(replace(deep, branch=0.01), BFLOAT16) == 2 * BFLOAT16
    for layers in (6, 24, 96, 192):
        for coupling in ("additive", "mean"):
            for half in (None, BFLOAT16):
                stack = Stack(coupling, 2 * layers)
                assert gradient_error(stack, half) <= tolerance(stack, half), "these two are never refused"
    assert gradient_error(deep, unit=BFLOAT16) > 100 * gradient_error(deep, unit=SINGLE)
