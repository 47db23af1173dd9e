"""The feed-forward half of a layer."""

from __future__ import annotations

from typing import Optional

import torch
from torch import nn

from ipu_lean.nn.activations import GATED
from ipu_lean.nn.fc import FCLayer
from ipu_lean.nn.precision import as_matmul_input


class FeedForward(nn.Module):
    """`[batch, seq, width] -> [batch, seq, width]`: down(act(up(x))), or down(act(gate(x)) * up(x)) for the gated kinds.

    Args:
        ffn_width: features in between.
        activation: gelu, relu, silu; geglu, swiglu, reglu (Shazeer 2020; a third matrix of the same size).
        dropout: share of the output dropped in training.
        init_scale: see `FCLayer`.
        mult: multiplies the output.
    """

    def __init__(
        self,
        width: int,
        ffn_width: int,
        activation: str = "gelu",
        dropout: float = 0.0,
        bias: bool = True,
        init_scale: float = 1.0,
        mult: float = 1.0,
    ) -> None:
        super().__init__()
        self.gated = activation in GATED
        inner = GATED.get(activation, activation)
        if self.gated:
            self.gate = FCLayer(width, ffn_width, inner, bias=bias, init_scale=init_scale)
        self.up = FCLayer(width, ffn_width, "none" if self.gated else inner, bias=bias, init_scale=init_scale)
        self.down = FCLayer(ffn_width, width, dropout=dropout, bias=bias, init_scale=init_scale, mult=mult)

    def forward(self, x: torch.Tensor, keep: Optional[torch.Tensor] = None) -> torch.Tensor:
        """`[..., width] -> [..., width]`, each row for itself; `keep` is a dropout mask that was drawn before."""
        if self.gated:
            x = as_matmul_input(x)
            return self.down(self.gate(x) * self.up(x), keep)
        return self.down(self.up(x), keep)

    def divisible(self) -> bool:
        """Whether it may be called with some rows at a time: nobody watches its layers or has replaced them."""
        layers = [self.up, self.down] + ([self.gate] if self.gated else [])
        return all(isinstance(layer, FCLayer) and layer.bare() for layer in layers)
