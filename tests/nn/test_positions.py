"""Positions: rotary against complex numbers, and tables that survive conversions."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from ipu_lean.errors import ConfigError
from ipu_lean.nn import LearnedPositions, Rotary, SinusoidalPositions

pytestmark = pytest.mark.pod


def rows(length):
    """Hidden states of that many positions; only their shape counts."""
    return torch.zeros(2, length, 8)


def turned(x, base, start=0):
    """The pair (i, i + half) as a complex number, multiplied by exp(i p rate)."""
    half = x.shape[-1] // 2
    z = torch.complex(x[..., :half], x[..., half:])
    rate = torch.tensor([base ** (-2.0 * i / x.shape[-1]) for i in range(half)], dtype=torch.float64)
    position = torch.arange(start, start + x.shape[1], dtype=torch.float64)
    z = z * torch.exp(1j * position[:, None] * rate)[:, None]
    return torch.cat([z.real, z.imag], -1)


@pytest.mark.parametrize("base,start", [(10000.0, 0), (500.0, 7)])
def test_rotary_equals_complex_multiplication(base, start):
    torch.manual_seed(0)
    x = torch.randn(2, 9, 3, 8, dtype=torch.float64)
    assert torch.allclose(Rotary(32, 8, base).double()(x, start), turned(x, base, start), atol=1e-13)
    single = Rotary(32, 8, base)(x.float(), start).double()
    assert torch.allclose(single, turned(x, base, start), atol=1e-5)


def test_rotary_scores_depend_on_distance_only():
    torch.manual_seed(0)
    rotary = Rotary(64, 16).double()
    q, k = torch.randn(1, 1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 1, 16, dtype=torch.float64)
    scores = [(rotary(q, p + 5) * rotary(k, p)).sum().item() for p in (0, 11, 40)]
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-12)


def test_rotary_keeps_the_input_type_and_moves_no_bit_at_position_zero():
    x = torch.randn(1, 1, 2, 4).to(torch.bfloat16)
    assert torch.equal(Rotary(4, 4)(x), x)


@pytest.mark.parametrize("make", [lambda: Rotary(16, 6), lambda: SinusoidalPositions(16, 6)])
def test_tables_survive_conversions(make):
    reference = {name: table.clone() for name, table in make().named_buffers()}
    with torch.device("meta"):
        empty = make()
    assert all(table.is_meta for table in empty.buffers())
    for module in (
        empty.to_empty(device="cpu"),
        copy.deepcopy(make()),
        make().to_empty(device="cpu").to_empty(device="cpu"),
        make().to(torch.bfloat16).float(),
        make().double().float(),
    ):
        for name, table in module.named_buffers():
            assert torch.equal(table, reference[name]), name
    double = dict(make().double().named_buffers())
    assert any((double[name] - table).abs().max() > 1e-9 for name, table in reference.items())
    assert not make().state_dict()


def test_sinusoidal_closed_form_and_size():
    table = SinusoidalPositions(50, 8, rms=0.3).double()(rows(50))
    assert table[:, 0].tolist() == pytest.approx([0.3 * 2**0.5 * math.sin(p) for p in range(50)], abs=1e-12)
    assert table.pow(2).mean(-1).sqrt().tolist() == pytest.approx([0.3] * 50)
    assert torch.equal(SinusoidalPositions(50, 8)(rows(5), 3), SinusoidalPositions(50, 8)(rows(8))[3:])


def test_learned_positions_are_rows_of_a_table():
    table = LearnedPositions(10, 4)
    assert torch.equal(table(rows(3), 2), table.weight[2:5])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Rotary(8, 5),
        lambda: SinusoidalPositions(8, 5),
        lambda: Rotary(8, 4)(torch.zeros(1, 9, 1, 4)),
        lambda: LearnedPositions(8, 4)(rows(5), 4),
        lambda: SinusoidalPositions(8, 4)(rows(9)),
    ],
)
def test_mistakes(wrong):
    with pytest.raises(ConfigError):
        wrong()


def test_rotary_of_a_bf16_model_turns_in_fp32():
    """Tables keep their type through `.to(bfloat16)`; a turn costs one rounding, also far away, where bf16 angles are wrong."""
    rotary = Rotary(2048, 32).to(torch.bfloat16)
    assert rotary.cos.dtype == torch.float32
    assert torch.equal(rotary.cos, Rotary(2048, 32).cos) and torch.equal(rotary.sin, Rotary(2048, 32).sin)
    torch.manual_seed(0)
    x = torch.randn(1, 2048, 2, 32).to(torch.bfloat16)
    truth = Rotary(2048, 32).double()(x.double())
    found = rotary(x)
    assert found.dtype == torch.bfloat16
    assert float((found.double() - truth).norm() / truth.norm()) < 2**-9
    assert torch.equal(found, truth.to(torch.bfloat16)) or float((found == truth.to(torch.bfloat16)).float().mean()) > 0.999
