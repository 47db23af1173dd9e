"""What is held, by kind, in bytes; and what it comes to by formula, from the shapes of the parameters alone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Tuple

from torch import nn

from ipu_lean.config import Config, derived
from ipu_lean.optim.any_precision_options import BETA_LIMIT
from ipu_lean.optim.any_precision_walk import EAGER_BLOCK
from ipu_lean.optim.fused import WAITING
from ipu_lean.train.memory.activations import activation_bytes, copy_bytes

KINDS = ("weights", "gradients", "moments", "compensation")
"""What is counted as bytes a parameter. Of gradients: the most that are alive at once."""
PASSING = 40  # bytes for an element of a block while it is updated without compiled code: about ten float32


@dataclass(frozen=True)
class Footprint:
    """Bytes of each kind.

    `copies`: of weights (autocast's casts, joined or scaled matrices); `activations`: all others, at their peak. `peak`: the most
    bytes of a whole update.
    """

    weights: int
    gradients: int
    moments: int
    compensation: int
    copies: int = 0
    activations: int = 0
    peak: int = 0

    @property
    def held(self) -> int:
        """Weights, gradients and optimizer state."""
        return self.weights + self.gradients + self.moments + self.compensation

    def as_dict(self, parameters: int) -> Dict[str, Any]:
        """With the sum, and the sum for each parameter."""
        return {**asdict(self), "held": self.held, "bytes_per_parameter": self.held / parameters}


def sizes_of(model: nn.Module) -> List[int]:
    """Elements of each parameter that is trained; tied and shared ones once."""
    return [parameter.numel() for parameter in model.parameters() if parameter.requires_grad]


def each(config: Config) -> Tuple[int, int, int, int]:
    """(weight, gradient, moments, compensation) in bytes for one parameter."""
    own, pure = config.optimizer, config.precision == "bf16-pure"
    weight = 2 if pure else 4
    if own.kind == "sgd":
        return weight, weight, weight if own.momentum else 0, 0
    first = second = 4
    if pure:
        first = 2 if own.betas[0] <= BETA_LIMIT else 4
        narrow = own.variance in ("bf16", "stochastic") or (own.variance == "auto" and own.betas[1] <= BETA_LIMIT)
        second = 2 if narrow else 4
    return weight, weight, first + second, 2 if pure and own.summation in ("kahan", "split") else 0


def predicted(config: Config, sizes: List[int], vocab: int) -> Footprint:
    """The formula for a configuration whose parameters have these sizes."""
    count = sum(sizes)
    weight, gradient, moments, kept = each(config)
    alive = together = count  # together: updated in one go
    if config.memory.fused_update:  # the largest, and the small ones that wait for the end
        waiting = sum(size for size in sizes if size < min(WAITING, max(sizes)))
        alive, together = min(count, max(sizes) + waiting), max(max(sizes), waiting)
    copies, activations = copy_bytes(config, vocab), activation_bytes(config, vocab)
    found = Footprint(count * weight, alive * gradient, count * moments, count * kept, copies, activations)
    # Activations are most before the first gradient is there. At the end there are all gradients, for a tied matrix two parts
    # beside their sum, or what an update makes in passing: torch's optimizers two of a tensor's size, ours some of a block's.
    pair = 2 * gradient * vocab * config.model.width if derived.tied(config.model) else 0
    passing = PASSING * min(EAGER_BLOCK, together) if config.precision == "bf16-pure" else 2 * weight * max(sizes)
    begin = copies + activations + (passing if config.memory.fused_update else 0)  # while all activations are there
    peak = found.held - found.gradients + max(begin, found.gradients + max(pair, passing))
    return Footprint(**{**asdict(found), "peak": peak})
