"""Matrix products of float16 tensors with float16 partial sums (Options.Precision.setPartialsType(torch.half)).

The multiply unit of a tile adds up 16 products of float16 numbers at a time, and what it has so far is stored in the type of the
partials. Here: 16 products are added in float32, then the sum so far is rounded, in the order of the contracted dimension. A
device may cut that dimension over tiles and add the pieces in another order, so its last bits differ. Products of the backward
pass have such partial sums too. Products of float32 tensors have float32 ones.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

import torch

from .errors import createPoptorchError
from .half import add_half, round_half
from .lossscale import watch

GROUP = 16
NAMES = ("mm", "bmm", "addmm", "baddbmm")
OTHERS = frozenset({"mv", "addmv", "dot", "vdot", "addbmm", "addr", "convolution", "convolution_overrideable", "conv_transpose2d",
                    "_trilinear", "cdist"})
"""Ops that add up products and are not emulated with float16 partials."""


def accumulate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`[…, m, k] @ […, k, n] -> […, m, n]`, all float16, the sum so far rounded after every 16 products."""
    total: Optional[torch.Tensor] = None
    size = a.shape[-1]
    for start in range(0, max(size, 1), GROUP):
        stop = min(start + GROUP, size)
        part = a[..., start:stop].float() @ b[..., start:stop, :].float()
        total = round_half(part if total is None else total.float().add_(part))
    assert total is not None
    return total


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return accumulate(a, b)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
        a, b = ctx.saved_tensors
        first = accumulate(gradient, b.transpose(-1, -2)) if ctx.needs_input_grad[0] else None
        second = accumulate(a.transpose(-1, -2), gradient) if ctx.needs_input_grad[1] else None
        for found in (first, second):
            if found is not None:
                watch(found)
        return first, second


def wrap(target: Callable[..., Any], name: str, meta: Dict[str, Any]) -> Callable[..., Any]:
    """`target`, an op in which float16 takes part, with float16 partial sums if it is a product. Error for one of OTHERS."""
    if name in OTHERS:
        raise createPoptorchError(f"float16 partial sums of aten::{name} are not emulated, only those of {', '.join(NAMES)} "
                                  f"({meta['where']}). Use Options.Precision.setPartialsType(torch.float)")
    return HalfProduct(name, target) if name in NAMES else target


class HalfProduct:
    """One of NAMES, on float16 matrices, with float16 partial sums; `otherwise` runs it where one of them is float32."""

    def __init__(self, name: str, otherwise: Callable[..., Any]) -> None:
        self.adds, self.otherwise = name in ("addmm", "baddbmm"), otherwise
        self.__name__ = self.__qualname__ = "half_partials_" + name
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        a, b = args[1:3] if self.adds else args[:2]
        if a.dtype != torch.float16 or b.dtype != torch.float16:
            return self.otherwise(*args, **kwargs)
        product = _Product.apply(a, b)
        if not self.adds:
            return product
        beta, alpha = (kwargs.get(name, args[place] if len(args) > place else 1) for name, place in (("beta", 3), ("alpha", 4)))
        return add_half(args[0], product, beta, alpha)
