"""What stands on top of the stack: a language model's readout, or a classifier's pooling and head (Kitaev et al. 2020)."""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from ipu_lean.models.spec import GPTSpec
from ipu_lean.nn import Embedding, FCLayer, PopReadout, TiedReadout


def make_head(spec: GPTSpec, token: Embedding) -> nn.Module:
    """The module that turns hidden states into logits; `token` is the embedding, whose matrix a tied readout shares."""
    if spec.head == "classifier":
        return ClassifierHead(spec)
    if spec.tied:
        return TiedReadout(token, spec.base_width, spec.output_mult)
    return _readout(spec, spec.hidden_width, spec.vocab, spec.hidden_base, bias=spec.readout_bias)


def _readout(spec: GPTSpec, width: int, rows: int, base: Optional[int], bias: bool) -> PopReadout:
    std = spec.init_scale * (base or width) ** -0.5
    return PopReadout(width, rows, bias, base, spec.readout_zero_init, spec.output_mult, init_std=std)


class ClassifierHead(nn.Module):
    """`[..., hidden_width] -> [..., classes]`: dropout, dense, tanh, dropout, projection: Reformer's published head.

    The dense layer goes back to the model's width, where the stack has put two streams side by side. The projection is a
    `PopReadout`: under muP it starts at zero and divides its input by the width's multiple of the base.
    """

    def __init__(self, spec: GPTSpec) -> None:
        super().__init__()
        self.dense = FCLayer(
            spec.hidden_width, spec.width, "tanh", spec.dropout, bias=spec.bias, init_scale=spec.init_scale
        )
        self.projection = _readout(spec, spec.width, spec.classes, spec.base_width, spec.bias)
        self.dropout = spec.dropout

    def forward(self, pooled: torch.Tensor) -> torch.Tensor:
        """`[..., hidden_width] -> [..., classes]`."""
        x = F.dropout(pooled, self.dropout, self.training) if self.dropout else pooled
        return self.projection(self.dense(x))


def pool(h: torch.Tensor, present: torch.Tensor, pooling: str) -> torch.Tensor:
    """`[batch, seq, width] -> [batch, width]`: the first token's state, or the mean over the tokens that are there.

    Args:
        present: bool `[batch, seq]`, False for padding. pooling: `first` or `mean`.
    """
    if pooling == "first":
        return h[:, 0]
    weights = present.to(h.dtype)
    return (h * (weights / weights.sum(1, keepdim=True).clamp(min=1.0)).unsqueeze(-1)).sum(1)
