"""MLP: fully connected layers that classify, the network on which muP's multipliers are easiest to see (Yang et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional, Tuple

import torch
from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.models.gpt import Block
from ipu_lean.mup import BaseShapes, Role
from ipu_lean.nn import FCLayer, PopReadout, automatic_chunk, chunked_cross_entropy


@dataclass(frozen=True)
class MLPSpec:
    """A resolved MLP: plain numbers, no muP left to decide.

    Attributes:
        features, width, depth, classes: numbers in an image, features of a hidden layer, hidden layers, numbers that come out.
        base_width: width of the muP base, which the readout divides by; None: multiplier 1.
        loss_chunk: rows whose logits are alive at once; None: automatic, 0: all.
    """

    features: int
    width: int
    depth: int
    classes: int
    activation: str = "relu"
    bias: bool = True
    dropout: float = 0.0
    base_width: Optional[int] = None
    init_scale: float = 1.0
    readout_zero_init: bool = False
    output_mult: float = 1.0
    loss_chunk: Optional[int] = None


class MLP(nn.Module):
    """images -> `depth` hidden layers -> readout.

    Attributes:
        spec, roles, base_shapes, sum_names: as a `GPT` has them; a token is a label, so the last sum counts images.
    """

    sum_names = ("loss", "correct", "tokens")

    def __init__(self, spec: MLPSpec) -> None:
        super().__init__()
        self.spec = spec
        self.roles: Dict[str, Role] = {}
        self.base_shapes: BaseShapes = {}
        sizes = [spec.features] + [spec.width] * spec.depth
        self.layers = nn.ModuleList(
            FCLayer(size, spec.width, spec.activation, spec.dropout, bias=spec.bias, init_scale=spec.init_scale)
            for size in sizes[:-1]
        )
        std = spec.init_scale * (spec.base_width or spec.width) ** -0.5
        self.readout = PopReadout(
            spec.width, spec.classes, spec.bias, spec.base_width, spec.readout_zero_init, spec.output_mult, init_std=std
        )
        self.loss_chunk, self.plain_loss = spec.loss_chunk, False

    def reset_parameters(self) -> None:
        """Initialise anew from torch's global generator, as building the model does. Base shapes and roles stay."""
        for layer in self.layers:
            layer.reset_parameters()
        self.readout.reset_parameters()

    def hidden(self, images: torch.Tensor) -> torch.Tensor:
        """float `[batch, features]` -> `[batch, width]`, in the type of the weights."""
        h = images.to(self.readout.weight.dtype)
        for layer in self.layers:
            h = layer(h)
        return h

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        """float `[batch, features]` -> `[batch, classes]`."""
        return self.readout(self.hidden(images))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """float `[batch, features]` -> logits `[batch, classes]`."""
        return self.logits(images)

    def loss(self, h: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """(mean cross entropy, float32 sums `[3]` named by `sum_names`).

        Args:
            h: `[batch, width]`, from `hidden`. labels: integers `[batch]`; -100 is not counted.
        """
        chunk = automatic_chunk(labels.numel(), self.spec.classes) if self.loss_chunk is None else self.loss_chunk
        return chunked_cross_entropy(h, labels, self.readout, chunk, plain=self.plain_loss)

    # What is chosen from outside and never changes the mathematics.

    def set_attention(self, implementation: str) -> None:
        """There is no attention to choose."""

    def set_engine(self, engine: str) -> None:
        """`store`: activations are kept. ConfigError for an engine that computes some of them again."""
        if engine != "store":
            raise ConfigError("an mlp keeps its few activations", key="memory.engine", value=engine)

    def set_loss(self, chunk: Optional[int] = None, plain: bool = False) -> None:
        """How the loss saves memory: rows per chunk (None: automatic, 0: all), and whether in `plain` operations (PopTorch)."""
        if chunk is not None and chunk < 0:
            raise ConfigError("rows per chunk; 0 for no chunks", key="memory.loss_chunk", value=chunk)
        self.loss_chunk, self.plain_loss = chunk, plain

    def blocks(self) -> List[Block]:
        """The stops of the forward pass in execution order."""
        found = [Block(f"layer{place}", layer, "layer", (), 1) for place, layer in enumerate(self.layers)]
        return [*found, Block("head", self.readout, "head")]
