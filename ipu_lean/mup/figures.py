"""What a coordinate check measures, as plain data: the judge (`judge.py`, `diagnosis.py`) sees nothing else.

`size` is what was varied, a width or a depth. Every figure is of one size and one seed. Sizes of tensors and activations are root
mean squares over all their entries unless the name says otherwise.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Callable, Dict, Iterable, List, Optional, Sequence, Tuple, TypeVar

from ipu_lean.mup.verdict import slope

HIDDEN, BRANCH, STREAM, OUTPUT = "hidden", "branch", "stream", "output"
ENOUGH = 3  # sizes: with two, a slope of what scatters has no error
T = TypeVar("T")


@dataclass(frozen=True)
class TensorFigure:
    """One parameter.

    Attributes:
        init: before training.
        first, first_step: the first weight update that moved it (its entries that moved), and which that was (1 is the first; 0:
            none did).
        last: the last update of the run. Updates are without weight decay.
        rate_built, rate: its learning rate as the optimizer was built with it, and at the last update.
        decay: share of the tensor that one update takes off when its gradient is zero; None if not measured.
        label: the role's kind, for wording; judgement goes by shapes.
    """

    size: int
    seed: int
    name: str
    shape: Tuple[int, ...]
    init: float
    first: float
    first_step: int
    last: float
    rate_built: float
    rate: float
    decay: Optional[float] = None
    label: str = ""


@dataclass(frozen=True)
class Coordinate:
    """What one module put out, x_t, at one step of training on one fixed batch; step 0 is before the first update.

    `role`: `branch` (what a residual branch adds), `stream` (what the layers hand to the final norm), `output` (of the readout)
    or `hidden` (any other). `change…` are statistics of x_t - x_0.
    """

    size: int
    seed: int
    step: int
    module: str
    role: str
    mean_abs: float
    rms: float
    change_mean_abs: float
    change: float
    change_std: float


@dataclass(frozen=True)
class Signature:
    """What a model does before training, when whatever starts at zero is drawn at random.

    Attributes:
        scores: attention scores before the softmax, by module, with queries that are not zero.
        head_size: features of an attention head; None without attention.
        readout: what the readout gives for inputs and weights drawn from normal(0, 1); None if it was not asked.
        readout_fan_in: features that it reads.
    """

    size: int
    seed: int
    scores: Dict[str, float] = field(default_factory=dict)
    head_size: Optional[int] = None
    readout: Optional[float] = None
    readout_fan_in: Optional[int] = None


@dataclass
class Figures:
    """All of one parametrisation's figures over one axis.

    Attributes:
        axis: `width` or `depth`. family: `adam` or `sgd`, the optimizer's rule.
        diverged: (size, seed, step) of runs that ended in a loss that was not finite; their figures stop there.
    """

    axis: str = "width"
    family: str = "adam"
    tensors: List[TensorFigure] = field(default_factory=list)
    coordinates: List[Coordinate] = field(default_factory=list)
    signatures: List[Signature] = field(default_factory=list)
    diverged: List[Tuple[int, int, int]] = field(default_factory=list)

    @property
    def sizes(self) -> List[int]:
        """Every size, once, ascending."""
        return sorted({figure.size for figure in [*self.tensors, *self.coordinates]})

    @property
    def few(self) -> Optional[str]:
        """Why slopes of activations decide nothing at so few sizes, as a sentence; None with `ENOUGH` of them."""
        if len(self.sizes) >= ENOUGH:
            return None
        return f"two {self.axis}s give a slope without an error, so this decides nothing: give three {self.axis}s or more"

    def steps(self) -> List[int]:
        """Every step, once, ascending."""
        return sorted({figure.step for figure in self.coordinates})

    def extend(self, other: Figures) -> None:
        """Take over another's rows."""
        self.tensors += other.tensors
        self.coordinates += other.coordinates
        self.signatures += other.signatures
        self.diverged += other.diverged


def grouped(rows: Iterable[T], key: Callable[[T], str]) -> Dict[str, List[T]]:
    """Rows by key, keys in order of first appearance."""
    found: Dict[str, List[T]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def slope_of(rows: Sequence[T], value: Callable[[T], float]) -> Optional[float]:
    """Slope over size of `value`; the mean over seeds of each seed's slope (one line through the means of the logarithms).

    None where a size has a value without logarithm, or there are fewer than two sizes.
    """
    by_size: Dict[int, List[float]] = {}
    for row in rows:
        by_size.setdefault(row.size, []).append(value(row))  # type: ignore[attr-defined]
    if any(not (math.isfinite(number) and number > 0) for numbers in by_size.values() for number in numbers):
        return None
    sizes = sorted(by_size)
    return slope(sizes, [2.0 ** (sum(map(math.log2, by_size[size])) / len(by_size[size])) for size in sizes])


def scatter_of(rows: Sequence[TensorFigure]) -> float:
    """Standard error of the slope of `init` by chance alone: a root mean square of n normal numbers is off by 1 / sqrt(2 n)."""
    entries: Dict[int, int] = {}
    for row in rows:
        entries[row.size] = entries.get(row.size, 0) + math.prod(row.shape)
    mean = sum(map(math.log2, entries)) / len(entries)
    spread = sum((math.log2(size) - mean) ** 2 for size in entries)
    squares = sum((math.log2(size) - mean) ** 2 / (2 * count) for size, count in entries.items())
    return math.sqrt(squares) / spread / math.log(2.0) if spread else 0.0
