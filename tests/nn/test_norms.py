"""Norms: closed forms, and float32 statistics under 16-bit inputs."""

from __future__ import annotations

import pytest
import torch

from ipu_lean.nn import make_norm

pytestmark = pytest.mark.pod


def closed_form(kind, x, weight, bias, eps):
    if kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_closed_form_in_double(kind):
    torch.manual_seed(0)
    norm = make_norm(kind, 10, 1e-3).double()
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 3, 10, dtype=torch.float64)
    assert torch.allclose(norm(x), closed_form(kind, x, norm.weight, getattr(norm, "bias", None), 1e-3), atol=1e-12)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_statistics_of_16_bit_inputs_are_taken_in_float32(kind, weights):
    """With a large mean, 8 bits of mantissa in the statistics would be off by tens of percent."""
    torch.manual_seed(0)
    norm = make_norm(kind, 512, 1e-5).to(weights)
    x = (torch.randn(16, 512) * 0.5 + 20).to(torch.bfloat16)
    expected = closed_form(kind, x.double(), norm.weight.double(), None, 1e-5)
    got = norm(x)
    assert got.dtype == torch.bfloat16
    assert ((got.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-3).all()


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_float32_under_autocast(kind):
    torch.manual_seed(0)
    norm = make_norm(kind, 64)
    x = torch.randn(4, 64) + 5
    with torch.autocast("cpu", torch.bfloat16):
        inside = norm(x)
    assert inside.dtype == torch.float32 and torch.equal(inside, norm(x))
