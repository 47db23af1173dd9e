"""Activations by name. GELU is always the tanh form, because PopTorch lowers both forms to it: devices then agree."""

from __future__ import annotations

from typing import Callable, Dict

import torch
import torch.nn.functional as F

Activation = Callable[[torch.Tensor], torch.Tensor]


def gelu(x: torch.Tensor) -> torch.Tensor:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) (Hendrycks and Gimpel 2016), in one kernel."""
    return F.gelu(x, approximate="tanh")


def identity(x: torch.Tensor) -> torch.Tensor:
    """x."""
    return x


ACTIVATIONS: Dict[str, Activation] = {"none": identity, "gelu": gelu, "relu": F.relu, "silu": F.silu, "tanh": torch.tanh}
GATED: Dict[str, str] = {"geglu": "gelu", "swiglu": "silu", "reglu": "relu"}  # Shazeer 2020
