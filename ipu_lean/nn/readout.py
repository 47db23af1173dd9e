"""Readouts: linear layers from a width to something that does not grow (the vocabulary).

muP multiplies their input by output_mult / m, m = width / base width (Yang et al. 2021, table 8, in the form of the mup package).
`mup.MuReadout` reads m from an attribute of its weight, which PopTorch, deepcopy, vmap, FSDP and functional_call lose; here m is
a Python float of the module. Multiplying first and dividing second gives mup's numbers bit for bit.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.nn.linear import normal_or_zero_


class _ScaledReadout(nn.Module):
    """What both readouts share: the multiplier, and its place in the checkpoint."""

    in_features: int
    base_width: Optional[int]
    output_mult: float

    @property
    def width_mult(self) -> float:
        """m = in_features / base_width; 1 without a base."""
        return 1.0 if self.base_width is None else self.in_features / self.base_width

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        """output_mult * x / width_mult. Factors of one are left out: they change no bit and would cost a pass each."""
        if self.output_mult != 1.0:
            x = self.output_mult * x
        return x if self.width_mult == 1.0 else x / self.width_mult

    def get_extra_state(self) -> torch.Tensor:
        """The base width, 0 for none, as a tensor: a state_dict then holds nothing but tensors."""
        return torch.tensor(self.base_width or 0, dtype=torch.int64, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """Take the checkpoint's base width, or refuse one that contradicts the model's (the logits would change)."""
        found = int(state) or None
        if self.base_width is not None and found != self.base_width:
            raise ConfigError(
                f"the checkpoint's readout was made for base width {found}, this model's is {self.base_width}",
                key="mup.base_width",
                value=self.base_width,
                suggestion="use the base that the checkpoint was trained with",
            )
        self.base_width = found

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"{super().extra_repr()}, base_width={self.base_width}, output_mult={self.output_mult}".lstrip(", ")


class PopReadout(_ScaledReadout, nn.Linear):
    """`[..., in_features] -> [..., out_features]` = Linear(output_mult * x / width_mult); the bias is not scaled.

    Args:
        base_width: in_features of the base model; None makes the multiplier 1 (the standard parametrisation).
        readout_zero_init: start at zero.
        output_mult: a hyperparameter that transfers over width.
        init_std: standard deviation of the weight unless it starts at zero; default 1 / sqrt(base_width), the same at every width
            and the standard one at the base.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        base_width: Optional[int] = None,
        readout_zero_init: bool = False,
        output_mult: float = 1.0,
        init_std: Optional[float] = None,
    ) -> None:
        self.base_width, self.output_mult, self.readout_zero_init = base_width, float(output_mult), readout_zero_init
        self._drawn_std = (base_width or in_features) ** -0.5 if init_std is None else init_std
        nn.Linear.__init__(self, in_features, out_features, bias)

    @property
    def init_stds(self) -> Dict[str, float]:
        """Standard deviation of each parameter at initialisation, by name."""
        return {"weight": 0.0 if self.readout_zero_init else self._drawn_std, "bias": 0.0}

    def reset_parameters(self) -> None:
        """Draw the weight anew; the bias becomes zero."""
        normal_or_zero_(self.weight, self._drawn_std, self.readout_zero_init)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def tensors(self) -> List[torch.Tensor]:
        """What the forward pass reads besides its input."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., in_features] -> [..., out_features]`."""
        return F.linear(self._scaled(x), self.weight, self.bias)


class TiedReadout(_ScaledReadout):
    """`[..., width] -> [..., vocab]` with the embedding's own matrix.

    It holds no parameter: it reads the embedding's when it is called. A parameter registered twice comes apart when parameters
    are replaced (to_empty, load_state_dict(assign=True)) and is written twice by a state_dict; this one cannot. The embedding is
    kept in a tuple so that it is not registered as a part of the readout.
    """

    def __init__(self, embedding: nn.Embedding, base_width: Optional[int] = None, output_mult: float = 1.0) -> None:
        super().__init__()
        self._source: Tuple[nn.Embedding] = (embedding,)
        self.in_features, self.out_features = embedding.embedding_dim, embedding.num_embeddings
        self.base_width, self.output_mult = base_width, float(output_mult)

    def tensors(self) -> List[torch.Tensor]:
        """What the forward pass reads besides its input."""
        return [self._source[0].weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., width] -> [..., vocab]`."""
        return F.linear(self._scaled(x), self._source[0].weight)
