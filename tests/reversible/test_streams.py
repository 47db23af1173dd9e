from __future__ import annotations

import pytest
import torch

from ipu_lean.errors import ConfigError
from ipu_lean.reversible import OUTPUTS, enter, leave

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


def test_every_output_is_tested_above():
    assert set(OUTPUTS) == {"x", "y", "sum", "sum-minus-input", "mean"}


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="sum-minus-input") as refused:
        leave(torch.ones(1), torch.ones(1), torch.ones(1), "sum_minus_input")
    assert refused.value.key == "model.stack.output" and refused.value.suggestion
    with pytest.raises(ConfigError):
        enter(torch.ones(1), "half")
