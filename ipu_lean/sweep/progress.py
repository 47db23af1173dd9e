"""What a person sees while trials run: a bar on a terminal, otherwise a line a trial."""

from __future__ import annotations

import math
import sys
from typing import Any, Callable, Optional

from ipu_lean.sweep.grid import lr_text
from ipu_lean.sweep.results import DONE, TrialResult


class SweepProgress:
    """Speaks while `total` trials run.

    Args:
        style: `auto`, `bar`, `plain` or `none` (logging.progress). say: takes lines.
    """

    def __init__(self, total: int, style: str, say: Callable[[str], None]) -> None:
        self.total, self.count, self.say = total, 0, say
        bar = style == "bar" or (style == "auto" and sys.stderr.isatty())
        self.style = style if style == "none" else ("bar" if bar else "plain")
        self.bar: Optional[Any] = None
        self.troubles = 0

    def __enter__(self) -> SweepProgress:
        if self.style == "bar":
            from tqdm import tqdm

            shape = "{percentage:3.0f}% |{bar:16}| {n_fmt}/{total_fmt} trials [{elapsed}<{remaining}]{postfix}"
            # Some terminals say that they have no rows, and tqdm would then show nothing.
            self.bar = tqdm(total=self.total, file=sys.stderr, dynamic_ncols=True, nrows=24, bar_format=shape)
        return self

    def __exit__(self, *_: Any) -> None:
        if self.bar is not None:
            self.bar.close()

    def result(self, result: TrialResult) -> None:
        """A trial has ended."""
        self.count += 1
        self.troubles += result.status != DONE
        text = describe(result)
        if self.bar is not None:
            # What went wrong comes first: a narrow terminal cuts off the end.
            self.bar.set_postfix_str((f"{self.troubles} not done, " if self.troubles else "") + text, refresh=False)
            self.bar.update(1)
        elif self.style == "plain":
            self.say(f"trial {self.count}/{self.total}  {text}")


def describe(result: TrialResult) -> str:
    """`mup width 64 lr 2^-7 seed 0  loss 3.2104  (12.3 s, local)`."""
    axes = dict(result.axes)
    words = [str(axes.pop("parametrization", ""))]
    words += [f"{name} {lr_text(value) if name == 'lr' else value}" for name, value in axes.items()]
    end = f"loss {result.loss:.4f}" if math.isfinite(result.loss) else f"{result.status}: {result.error}"
    return f"{' '.join(words)}  {end}  ({result.seconds:.1f} s, {result.executor})"
