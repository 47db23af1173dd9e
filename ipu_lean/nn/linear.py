"""A linear layer that is initialised once, the way muP and the standard parametrisation agree on.

Hidden matrices start as normal with standard deviation init_scale / sqrt(fan_in), biases at zero (Yang et al. 2021, table 8: the
variance of a matrix with two growing dimensions is 1 / fan_in; GPT-2's constant 0.02 is the same rule at one width only).
"""

from __future__ import annotations

from typing import Dict

import torch
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

    `init_stds` names the standard deviation that each parameter was drawn with (0 for zeros and constants).
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, init_scale: float = 1.0, zero_init: bool = False
    ) -> None:
        self.init_scale, self.zero_init = init_scale, zero_init
        super().__init__(in_features, out_features, bias)

    @property
    def init_std(self) -> float:
        """Standard deviation of the weight at initialisation."""
        return 0.0 if self.zero_init else self.init_scale / self.in_features**0.5

    @property
    def init_stds(self) -> Dict[str, float]:
        """Standard deviation of each parameter at initialisation, by name."""
        return {"weight": self.init_std, "bias": 0.0}

    def reset_parameters(self) -> None:
        """Draw the weight anew; the bias becomes zero."""
        normal_or_zero_(self.weight, self.init_scale / self.in_features**0.5, self.zero_init)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
