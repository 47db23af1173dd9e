"""Recognising torch.func transforms, under which Python autograd functions are left alone."""

from __future__ import annotations

import torch


def transformed(x: torch.Tensor) -> bool:
    """Whether a `torch.func` transform (vmap, grad, vjp) is at work on `x`; those want ordinary operations."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(x))
