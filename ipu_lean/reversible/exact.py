"""Exact inversion: the additive coupling on streams that are multiples of 2^-bits.

A floating-point sum of two multiples of 2^-bits is exact while its size stays below 2^(p - bits), p the bits of the significand
(24 in float32). So if the stack's input and every branch output are rounded to that grid before they are added, each half-step
back gives bit for bit what went in, at any depth. Rounding is a change of what is computed (of size 2^-bits / 2 a branch); its
gradient is taken as that of no rounding. Streams are never narrower than float32: what a branch gives in 16 bits is widened
first.

Bits for float32 streams: 14 allows sizes up to 1024 in steps of 6e-5, 12 up to 4096 in steps of 2.4e-4, 10 up to 16384 in steps
of 1e-3. bfloat16 has a significand of 8 bits and float16 of 11; with a useful step nothing would be left for the range, so
streams are kept in float32 under autocast and pure 16-bit streams are refused.
"""
from __future__ import annotations

import math

import torch
from torch import Tensor

from ipu_lean.errors import ConfigError, RunError

from .couplings import Additive

DEFAULT_BITS = 14
_HALF = (torch.bfloat16, torch.float16)


def to_grid(x: Tensor, bits: int) -> Tensor:
    """`x` rounded to multiples of 2^-bits, with the gradient of `x` itself; 16-bit tensors become float32."""
    x = x.float() if x.dtype in _HALF else x
    rounded = torch.round(x * 2.0**bits) * 2.0**-bits
    # The difference is exact (Sterbenz), and so is adding it: the value is `rounded`, the derivative is 1.
    return x + (rounded - x).detach() if torch.is_grad_enabled() else rounded


def range_of(dtype: torch.dtype, bits: int) -> float:
    """Sizes below this are added exactly."""
    significand = 1 - round(math.log2(torch.finfo(dtype).eps))
    return 2.0 ** (significand - bits)


class ExactAdditive(Additive):
    """(a, b) -> (b, a + round(f(b))) on a grid of 2^-bits.

    Args:
        bits: binary digits after the point.
    Raises:
        RunError: in `write`, a stream left the range in which sums are exact. Where values cannot be read (PopTorch's tracing,
            `torch.func` transforms) nothing is checked.
    """

    def __init__(self, bits: int = DEFAULT_BITS) -> None:
        if not 1 <= bits <= 22:
            raise ConfigError(
                "binary digits after the point of float32 streams, 1 to 22",
                key="model.stack.exact_bits",
                value=bits,
                suggestion=f"use {DEFAULT_BITS}: streams below {range_of(torch.float32, DEFAULT_BITS):g}",
            )
        self.bits = bits

    def __repr__(self) -> str:
        return f"additive exact_bits={self.bits}"

    def admit(self, x0: Tensor) -> Tensor:
        """The stack's input on the grid."""
        x0 = to_grid(x0, self.bits)
        self._check(x0, "the stack's input")
        return x0

    def write(self, x: Tensor, fx: Tensor, step: int) -> Tensor:
        y = x + to_grid(fx, self.bits)
        self._check(y, f"the stream that half-step {step} wrote")
        return y

    def unwrite(self, y: Tensor, fx: Tensor, step: int) -> Tensor:
        return y - to_grid(fx, self.bits)

    def _check(self, x: Tensor, what: str) -> None:
        if x.device.type not in ("cpu", "cuda") or type(x) is not Tensor or torch._C._are_functorch_transforms_active():
            return
        limit = range_of(x.dtype, self.bits)
        with torch.no_grad():
            size = float(x.abs().amax())
        if size >= limit:
            raise RunError(
                f"{what} reached {size:.4g}, and with `model.stack.exact_bits: {self.bits}` sums are exact below {limit:g}. "
                f"Set it to {max(1, self.bits - 2)} or less (each bit less doubles the range), lower the learning rate, or turn "
                "`model.stack.exact` off."
            )
