"""Where low precision needs a hand."""

from __future__ import annotations

import torch

from ipu_lean._compat import autocast_state

_AUTOCAST_DEVICES = ("cpu", "cuda")


def as_matmul_input(x: torch.Tensor) -> torch.Tensor:
    """`x` in the type that autocast will compute matrix products in (or as it is, without autocast).

    Autocast casts activations anew for each operation that reads them; one cast serves several linear layers on the same input.
    """
    if x.dtype == torch.float32 and x.device.type in _AUTOCAST_DEVICES:
        enabled, dtype = autocast_state(x.device.type)
        if enabled:
            return x.to(dtype)
    return x
