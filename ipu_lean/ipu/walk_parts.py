"""What the walks over a reversible stack are made of beside its branches: its ends as modules, and the sum of the surrogate."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn


class Head(nn.Module):
    """Hidden states after the final norm -> the model's loss and sums, as a module of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, h: Tensor, labels: Tensor, present: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:
        """`[micro, seq, width]`, integers `[micro, seq]` (or `[micro]`), bool `[micro, seq]`."""
        return self.model.loss(self.model.pooled(h, present), labels)

    def names(self) -> List[str]:
        """The parameters that it reads: the readout's, which may be the embedding's."""
        own = getattr(self.model.readout, "tensors", self.model.readout.parameters)
        read = {id(tensor) for tensor in own()}
        return [name for name, parameter in self.named_parameters() if id(parameter) in read]


class Leave(nn.Module):
    """The two streams after the last block and the stack's input -> the stack's result."""

    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, a: Tensor, b: Tensor, x0: Tensor) -> Tensor:
        """Streams."""
        return self.stack.leave(a, b, x0)

    def names(self) -> List[str]:
        """The parameters that it reads: a learned gate's."""
        return [name for name, _ in self.named_parameters() if not name.startswith("stack.blocks.")]


class Products:
    """The sum of weight times gradient over the weights, in float32 or better: its derivative is the gradients.

    What several visits give to one weight is added up first, so that one copy is kept.
    """

    def __init__(self) -> None:
        self._gradients: Dict[int, Tensor] = {}
        self.total: Optional[Tensor] = None

    def add(self, weights: Sequence[Tensor], gradients: Sequence[Optional[Tensor]], last: bool = True) -> None:
        """Take in the gradients of one visit; `last`: no further visit to these weights comes before they are needed."""
        for weight, gradient in zip(weights, gradients):
            if gradient is None or not weight.requires_grad:
                continue
            known = self._gradients.pop(id(weight), None)
            gradient = gradient if known is None else known + gradient
            if last:
                self._take(weight, gradient)
            else:
                self._gradients[id(weight)] = gradient

    def _take(self, weight: Tensor, gradient: Tensor) -> None:
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        product = (weight * gradient.detach().to(weight.dtype)).sum(dtype=wide)
        self.total = product if self.total is None else self.total + product
