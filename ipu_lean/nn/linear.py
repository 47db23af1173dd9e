"""A linear layer that is initialised once, the way muP and the standard parametrisation agree on.

Hidden matrices start as normal with standard deviation init_scale / sqrt(fan_in), biases at zero (Yang et al. 2021, table 8: the
variance of a matrix with two growing dimensions is 1 / fan_in; GPT-2's constant 0.02 is the same rule at one width only).
"""

from __future__ import annotations

from typing import Dict

import torch
import torch.nn.functional as F
from torch import nn


def normal_or_zero_(weight: torch.Tensor, std: float, zero: bool) -> None:
    """Draw `weight` from normal(0, std), then clear it if `zero`: a zero start consumes the same random numbers, so models that
    differ in their zero starts only agree in every other weight."""
    with torch.no_grad():
        weight.normal_(0.0, std)
        if zero:
            weight.zero_()


class Linear(nn.Linear):
    """`[..., in_features] -> [..., out_features]`; nn.Linear with the initialisation above.

    Args:
        mult: multiplies the output (a residual branch's multiplier). The weight and the bias are multiplied in its place, because
            they are smaller than the output.

    `init_stds` names the standard deviation that each parameter was drawn with (0 for zeros and constants).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        init_scale: float = 1.0,
        zero_init: bool = False,
        mult: float = 1.0,
    ) -> None:
        self.init_scale, self.zero_init, self.mult = init_scale, zero_init, float(mult)
        super().__init__(in_features, out_features, bias)

    @property
    def init_std(self) -> float:
        """Standard deviation of the weight at initialisation."""
        return 0.0 if self.zero_init else self.init_scale / self.in_features**0.5

    @property
    def init_stds(self) -> Dict[str, float]:
        """Standard deviation of each parameter at initialisation, by name."""
        return {"weight": self.init_std, "bias": 0.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features] -> [..., out_features]`."""
        if self.mult == 1.0:
            return F.linear(x, self.weight, self.bias)
        return F.linear(x, self.weight * self.mult, None if self.bias is None else self.bias * self.mult)

    def reset_parameters(self) -> None:
        """Draw the weight anew; the bias becomes zero."""
        normal_or_zero_(self.weight, self.init_scale / self.in_features**0.5, self.zero_init)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
