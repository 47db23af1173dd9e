from __future__ import annotations

import pytest
import torch

from ipu_lean.errors import ConfigError
from ipu_lean.reversible import INPUTS, OUTPUTS, enter, leave
from ipu_lean.reversible.streams import make_gate

pytestmark = pytest.mark.pod


def test_duplicate_makes_no_copy():
    x0 = torch.randn(2, 3, 4)
    a, b = enter(x0, "duplicate")
    assert a is x0 and b is x0


@pytest.mark.parametrize(
    ("kind", "expected"), [("x", 2.0), ("y", 7.0), ("sum", 9.0), ("sum-minus-input", 8.0), ("mean", 4.5)]
)
def test_outputs_by_hand(kind, expected):
    x, y, x0 = torch.full((1, 2, 3), 2.0), torch.full((1, 2, 3), 7.0), torch.ones(1, 2, 3)
    assert torch.equal(leave(x, y, x0, kind), torch.full((1, 2, 3), expected))


def test_every_output_is_tested():
    assert set(OUTPUTS) == {"x", "y", "sum", "sum-minus-input", "mean", "concat"}


def test_concat_and_gates_by_hand():
    x, y = torch.full((1, 2, 3), 2.0), torch.full((1, 2, 3), 7.0)
    assert leave(x, y, x, "concat").tolist() == [[[2.0, 2, 2, 7, 7, 7]] * 2]
    for kind, features in (("gate", 1), ("gate-channels", 3)):
        gate = make_gate(kind, 3)
        assert gate.weight.shape == (features,) and torch.equal(leave(x, y, x, kind, gate), torch.full((1, 2, 3), 4.5))
        with torch.no_grad():
            gate.weight.fill_(30.0)
        assert torch.allclose(leave(x, y, x, kind, gate), x), "g = 1 is the first stream"
        gate.reset_parameters()
        assert gate.weight.abs().max() == 0
    assert make_gate("sum", 3) is None
    with pytest.raises(ConfigError, match="gate"):
        leave(x, y, x, "gate")


def test_zeros_and_halves():
    x0 = torch.randn(2, 3, 4)
    zero = torch.zeros_like(x0)
    for kind, reads_second, expected in (
        ("zeros", True, (zero, x0)),
        ("zeros", False, (x0, zero)),
        ("zeros-read", True, (x0, zero)),
        ("zeros-read", False, (zero, x0)),
        ("split", True, (x0[..., :2], x0[..., 2:])),
        ("split", False, (x0[..., :2], x0[..., 2:])),
    ):
        assert all(torch.equal(u, v) for u, v in zip(enter(x0, kind, reads_second), expected)), kind
    assert set(INPUTS) == {"duplicate", "zeros", "zeros-read", "split"}
    with pytest.raises(ConfigError, match="even width"):
        enter(torch.ones(1, 1, 3), "split")


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="sum-minus-input") as refused:
        leave(torch.ones(1), torch.ones(1), torch.ones(1), "sum_minus_input")
    assert refused.value.key == "model.stack.output" and refused.value.suggestion
    with pytest.raises(ConfigError):
        enter(torch.ones(1), "half")
