"""Derivatives and kernels written in plainer operations, for devices that lack torch's own."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
from torch import Tensor

aten = torch.ops.aten
Rules = Dict[Any, Callable[..., Any]]


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def native_layer_norm(
    x: Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float
) -> Tuple[Tensor, Tensor, Tensor]:
    """(normalised, mean, reciprocal deviation), statistics in float32 or better.

    torch's own decomposition uses var_mean, whose overloads differ between releases and devices.
    """
    dims = list(range(x.dim() - len(shape), x.dim()))
    wide = _wide(x)
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    rate = torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)
    out = centred * rate
    if weight is not None:
        out = out * _wide(weight)
    if bias is not None:
        out = out + _wide(bias)
    return out.to(x.dtype), mean, rate


def native_layer_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rate: Tensor, weight: Any, bias: Any, wanted: List[bool]
) -> Tuple[Any, Any, Any]:
    """Gradients of input, weight and bias (None where not wanted)."""
    dims = list(range(x.dim() - len(shape), x.dim()))
    rows = list(range(x.dim() - len(shape)))
    wide = _wide(grad)
    normal = (_wide(x) - mean) * rate
    x_grad = weight_grad = bias_grad = None
    if wanted[0]:
        inner = wide if weight is None else wide * _wide(weight)
        share = normal * (inner * normal).mean(dims, keepdim=True)
        x_grad = ((inner - inner.mean(dims, keepdim=True) - share) * rate).to(x.dtype)
    if wanted[1] and weight is not None:
        weight_grad = ((wide * normal).sum(rows) if rows else wide * normal).to(weight.dtype)
    if wanted[2] and bias is not None:
        bias_grad = (wide.sum(rows) if rows else wide).to(bias.dtype)
    return x_grad, weight_grad, bias_grad


def _padded(grad: Tensor, dim: int, before: int, after: int) -> Tensor:
    """`grad` with zeros before and after it in one dimension."""
    pad = [0, 0] * (grad.dim() - dim % grad.dim())
    pad[-2:] = [before, after]
    return aten.constant_pad_nd.default(grad, pad, 0.0)


def slice_backward(grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Any:
    """Zeros around the gradient; torch's form writes into a tensor of zeros."""
    if step != 1:
        return NotImplemented
    size = sizes[dim]
    start = max(0, start + size if start < 0 else start)
    return _padded(grad, dim, start, size - start - grad.shape[dim])


def select_backward(grad: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    """The same for one index."""
    size, dim = sizes[dim], dim % len(sizes)
    index = index + size if index < 0 else index
    return _padded(grad.unsqueeze(dim), dim, index, size - index - 1)


def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """The derivative of x sigmoid(x)."""
    wide, gate = _wide(x), torch.sigmoid(_wide(x))
    return (_wide(grad) * gate * (wide * (1.0 - gate) + 1.0)).to(x.dtype)


def threshold_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    """The gradient where x is above the threshold."""
    return grad * (x > threshold).to(grad.dtype)


def softmax_backward(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """y (g - sum(y g)), in float32 or better: it is a difference of nearly equal numbers.

    Weights in 16 bits do not add up to one; divided by their sum, a gradient that is equal for all of a row still gives zero.
    """
    wide, weights = _wide(grad), _wide(out)
    share = (wide * weights).sum(dim, keepdim=True)
    if out.dtype in (torch.float16, torch.bfloat16):
        share = share / weights.sum(dim, keepdim=True)
    return (weights * (wide - share)).to(dtype)


# Always taken: kernels with several results, whose further results a device may not give, and what torch's own rules write with
# fills and scalar tensors.
BASIC: Rules = {
    aten.native_layer_norm.default: native_layer_norm,
    aten.native_layer_norm_backward.default: native_layer_norm_backward,
    aten._softmax_backward_data.default: softmax_backward,
    aten.slice_backward.default: slice_backward,
    aten.select_backward.default: select_backward,
    aten.silu_backward.default: silu_backward,
    aten.threshold_backward.default: threshold_backward,
}


def rule_for(target: Any) -> Any:
    """torch's decomposition of an operation, or None."""
    from torch._decomp import decomposition_table

    return decomposition_table.get(target)
