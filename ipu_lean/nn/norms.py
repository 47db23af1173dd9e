"""Norms over the last dimension. Their statistics are taken in float32 (or better), whatever the input's precision."""

from __future__ import annotations

from typing import Dict

import torch
import torch.nn.functional as F
from torch import nn


def _wide(x: torch.Tensor) -> torch.Tensor:
    """`x` in at least float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class LayerNorm(nn.LayerNorm):
    """`[..., width] -> [..., width]`: zero mean, unit variance, then gain and bias (Ba et al. 2016).

    The gain and the bias always exist: PopTorch refuses a layer norm that has only one of them.
    """

    init_stds: Dict[str, float] = {"weight": 0.0, "bias": 0.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., width]`, in the type of `x`. A 16-bit input is widened unless the gain is 16 bits too, where torch's and
        PopART's kernels take the statistics in float32 themselves."""
        if x.dtype == self.weight.dtype:
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return F.layer_norm(_wide(x), self.normalized_shape, _wide(self.weight), _wide(self.bias), self.eps).to(x.dtype)


class RMSNorm(nn.Module):
    """`[..., width] -> [..., width]`: x / sqrt(mean(x^2) + eps) times a gain (Zhang and Sennrich 2019)."""

    init_stds: Dict[str, float] = {"weight": 0.0}

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def reset_parameters(self) -> None:
        """The gain becomes one."""
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., width]`, in the type of `x`."""
        wide = _wide(x)
        scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


def make_norm(kind: str, width: int, eps: float = 1e-5) -> nn.Module:
    """A norm by its name in the configuration: `layernorm`, `rmsnorm`, or `none` (the identity)."""
    if kind == "layernorm":
        return LayerNorm(width, eps=eps)
    if kind == "rmsnorm":
        return RMSNorm(width, eps=eps)
    assert kind == "none", kind
    return nn.Identity()
