"""What a check of muP answers: pass, fail or inconclusive, with the number and the threshold that decided it.

Slopes are powers of the width: the least-squares line of log2(value) over log2(width), so +1 doubles when the width doubles.
"""
from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Dict, Iterable, Optional, Sequence

PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"


@dataclass(frozen=True)
class Verdict:
    """One question's answer.

    Attributes:
        name: what was asked, in a few words.
        status: `pass`, `fail` or `inconclusive`.
        number: the figure that decided; None if it could not be taken.
        threshold: what `number` was held against; None if there is nothing to hold it against.
        text: one sentence for people.
    """

    name: str
    status: str
    number: Optional[float]
    threshold: Optional[float]
    text: str

    def __post_init__(self) -> None:
        assert self.status in (PASS, FAIL, INCONCLUSIVE), self.status

    def as_dict(self) -> Dict[str, Any]:
        """Plain JSON: a number that is not finite becomes None."""
        plain = asdict(self)
        for key in ("number", "threshold"):
            if plain[key] is not None and not math.isfinite(plain[key]):
                plain[key] = None
        return plain


def overall(verdicts: Iterable[Verdict]) -> str:
    """`fail` if any failed, else `inconclusive` if any is (or there are none), else `pass`."""
    found = {verdict.status for verdict in verdicts}
    if FAIL in found:
        return FAIL
    return PASS if found == {PASS} else INCONCLUSIVE


def signed(number: float) -> str:
    """Two decimals with a sign, and no minus before a zero."""
    return f"{round(number, 2) + 0.0:+.2f}"


def slope(widths: Sequence[float], values: Sequence[float]) -> Optional[float]:
    """The power of the width with which `values` grow; None with fewer than two widths, or a value that has no logarithm."""
    if len(set(widths)) < 2 or not all(math.isfinite(value) and value > 0 for value in values):
        return None
    xs, ys = [math.log2(width) for width in widths], [math.log2(value) for value in values]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys)) / spread
