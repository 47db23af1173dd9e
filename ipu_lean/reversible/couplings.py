"""Couplings: how one stream takes in what a branch computed from the other, and how that is undone.

A coupling is two pure functions of tensors. The rest of the room (streams, engine, stack) knows no more about it.
"""
from __future__ import annotations

from typing import Dict

from torch import Tensor

from ipu_lean.errors import ConfigError, did_you_mean


class Additive:
    """y = x + f: the coupling of NICE (Dinh et al. 2014), RevNet (Gomez et al. 2017) and Reformer (Kitaev et al. 2020).

    Volume-preserving; in floating point the inverse is off by one rounding of the sum, whatever the depth of the stack.
    """

    name = "additive"

    @staticmethod
    def forward(x: Tensor, fx: Tensor) -> Tensor:
        """[batch, seq, width] twice -> [batch, seq, width]."""
        return x + fx

    @staticmethod
    def inverse(y: Tensor, fx: Tensor) -> Tensor:
        """The x that `forward` took, from its result and the same fx."""
        return y - fx


Coupling = Additive
COUPLINGS: Dict[str, Coupling] = {Additive.name: Additive()}


def coupling_named(name: str) -> Coupling:
    """The coupling called `name`; ConfigError if there is none."""
    if name not in COUPLINGS:
        near = did_you_mean(name, COUPLINGS)
        raise ConfigError(
            f"the coupling is one of: {', '.join(COUPLINGS)}",
            key="model.stack.coupling",
            value=name,
            suggestion=f"did you mean `{near}`?" if near else None,
        )
    return COUPLINGS[name]
