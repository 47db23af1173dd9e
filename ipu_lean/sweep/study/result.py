"""What one variant came to with one seed: a trial's result, with gradient norms, memory and speed."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Dict, List, Optional

from ipu_lean.sweep.results import DONE, Store, TrialResult


@dataclass(frozen=True)
class VariantResult(TrialResult):
    """Beside what a trial has:

    Attributes:
        grad_norms: of each update, before clipping.
        peak_mb: most bytes of activations alive in a forward and backward pass of one micro-batch, parameters and their
            gradients aside, in 1e6; None where it cannot be measured.
        tokens_per_s: tokens of an update over the median time of an update, the first ones left out.
        weight_norm: Euclidean norm of all weights at the end; None unless it came there.
    """

    grad_norms: List[float] = field(default_factory=list)
    peak_mb: Optional[float] = None
    tokens_per_s: Optional[float] = None
    weight_norm: Optional[float] = None

    @classmethod
    def of(cls, result: TrialResult, **more: Any) -> VariantResult:
        """A trial's result with the rest."""
        return cls(**{**asdict(result), **more})

    def as_json(self) -> Dict[str, Any]:
        """Plain JSON; numbers that are not finite become strings."""
        return {**super().as_json(), "grad_norms": [str(value) for value in self.grad_norms]}

    @classmethod
    def from_json(cls, plain: Dict[str, Any]) -> VariantResult:
        """What `as_json` gave."""
        norms = [float(value) for value in plain["grad_norms"]]
        return super().from_json({"weight_norm": None, **plain, "grad_norms": norms})  # type: ignore


def score(result: VariantResult) -> float:
    """What variants are ranked by: loss of the first validation set, or the training loss if there is none."""
    if result.status != DONE:
        return math.inf
    return next(iter(result.valid.values()), result.loss)


class VariantStore(Store):
    """`trials/ID.json` of a study."""

    kind = VariantResult
