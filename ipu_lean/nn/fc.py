"""The fully connected layer that everything is made of."""

from __future__ import annotations

from typing import Dict, Iterable, Optional

import torch
import torch.nn.functional as F
from torch import nn

from ipu_lean.errors import ConfigError, did_you_mean
from ipu_lean.nn.activations import ACTIVATIONS
from ipu_lean.nn.dropout import dropped
from ipu_lean.nn.linear import Linear
from ipu_lean.nn.norms import make_norm
from ipu_lean.nn.readout import PopReadout


class FCLayer(nn.Module):
    """`[..., in_dim] -> [..., out_dim]`: linear, then norm, activation and dropout, each if asked for.

    Args:
        activation: none, gelu (tanh form), relu, silu, tanh.
        dropout: share of the output dropped in training.
        normalization: none, layernorm, rmsnorm.
        is_readout_layer: the output does not grow with width, so `.linear` is a `PopReadout`.
        base_width: in_dim of the muP base; only a readout uses it (None: multiplier 1).
        init_scale: the weight's standard deviation is init_scale / sqrt(in_dim); a readout's is init_scale / sqrt(base_width).
        zero_init: the weight starts at zero.
        mult: multiplies what the linear layer puts out; a readout has multipliers of its own.

    Raises ConfigError for an unknown activation or norm.
    """

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        activation: str = "none",
        dropout: float = 0.0,
        normalization: str = "none",
        bias: bool = True,
        is_readout_layer: bool = False,
        base_width: Optional[int] = None,
        init_scale: float = 1.0,
        zero_init: bool = False,
        mult: float = 1.0,
    ) -> None:
        super().__init__()
        _known("activation", activation, ACTIVATIONS)
        _known("normalization", normalization, ("none", "layernorm", "rmsnorm"))
        if is_readout_layer:
            std = init_scale * (base_width or in_dim) ** -0.5
            self.linear: nn.Module = PopReadout(in_dim, out_dim, bias, base_width, readout_zero_init=zero_init, init_std=std)
        else:
            self.linear = Linear(in_dim, out_dim, bias, init_scale, zero_init, mult)
        self.norm: Optional[nn.Module] = None if normalization == "none" else make_norm(normalization, out_dim)
        self.activation, self.dropout = activation, dropout

    @property
    def init_stds(self) -> Dict[str, float]:
        """Standard deviation of each parameter at initialisation, by name."""
        found = {f"linear.{name}": std for name, std in self.linear.init_stds.items()}
        if self.norm is not None:
            found.update({f"norm.{name}": std for name, std in self.norm.init_stds.items()})
        return found

    def reset_parameters(self) -> None:
        """Initialise anew, with muP's standard deviations."""
        self.linear.reset_parameters()
        if self.norm is not None:
            self.norm.reset_parameters()

    def forward(self, x: torch.Tensor, keep: Optional[torch.Tensor] = None) -> torch.Tensor:
        """`[..., in_dim] -> [..., out_dim]`; `keep` `[..., out_dim]` is a mask for the dropout, drawn before (dropout.py)."""
        x = self.linear(x)
        if self.norm is not None:
            x = self.norm(x)
        if self.activation != "none":
            x = ACTIVATIONS[self.activation](x)
        if keep is not None:
            return dropped(x, keep, self.dropout)
        return F.dropout(x, self.dropout, self.training) if self.dropout else x

    def bare(self) -> bool:
        """Whether a call is nothing but what is written here: no hooks (pruning, weight norm, probes), no other class."""
        modules = (self, self.linear)
        hooks = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules)
        return not hooks and type(self) is FCLayer and type(self.linear) in (Linear, PopReadout)

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"activation={self.activation}, dropout={self.dropout}"


def _known(key: str, value: str, known: Iterable[str]) -> None:
    """Refuse a name that is not in `known`."""
    names = list(known)
    if value not in names:
        near = did_you_mean(value, names)
        raise ConfigError(
            f"it is one of {', '.join(names)}", key=key, value=value, suggestion=f"did you mean `{near}`" if near else None
        )
