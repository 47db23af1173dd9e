from __future__ import annotations

import pytest
import torch

from ipu_lean.errors import ConfigError
from ipu_lean.reversible import COUPLINGS, Additive, coupling_named

pytestmark = pytest.mark.pod


def test_additive_by_hand():
    x, fx = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 4.0])
    y = Additive.forward(x, fx)
    assert y.tolist() == [1.5, 2.0]
    assert Additive.inverse(y, fx).tolist() == x.tolist()


def test_inverse_is_off_by_one_rounding_of_the_sum():
    torch.manual_seed(0)
    x, fx = torch.randn(10000), torch.randn(10000)
    y = Additive.forward(x, fx)
    off = (Additive.inverse(y, fx) - x).abs()
    assert 0 < off.max() <= torch.finfo(torch.float32).eps * (y.abs() + fx.abs()).max()


def test_names():
    assert isinstance(coupling_named("additive"), Additive) and set(COUPLINGS) == {"additive"}
    with pytest.raises(ConfigError, match="model.stack.coupling.*did you mean `additive`|Did you mean `additive`"):
        coupling_named("aditive")
