"""Recognising torch.func transforms, under which Python autograd functions are left alone."""

from __future__ import annotations

import torch

from ipu_lean._compat import compiling


def transformed(x: torch.Tensor) -> bool:
    """Whether a `torch.func` transform (vmap, grad, vjp) is at work on `x`; those want ordinary operations."""
    return not compiling() and bool(torch._C._functorch.is_functorch_wrapped_tensor(x))
