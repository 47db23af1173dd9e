"""What a study shows: a ranking, a CSV file, and curves of loss and gradient norm."""

from __future__ import annotations

import csv
import io
import math
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from ipu_lean.mup.verdict import Verdict
from ipu_lean.sweep.grid import Trial
from ipu_lean.sweep.results import DIVERGED, DONE
from ipu_lean.sweep.study.judge import Comparison, compare
from ipu_lean.sweep.study.result import VariantResult, VariantStore, score
from ipu_lean.sweep.trial import diverged_at
from ipu_lean.train.files import disk_guard, write_atomic

POINTS = 200  # of a curve: losses are averaged over equal stretches of updates


@dataclass(frozen=True)
class Row:
    """One variant over its seeds.

    Attributes:
        loss, train_loss: means over the seeds that came to their end; `loss` is that of the first validation set, or the
            training loss if there is none. spread: largest minus smallest `loss`, which takes two seeds. None if a seed did not
            come to its end.
        grad_norm: median over updates and seeds. weight_norm: mean over seeds. beside: what it is beside the reference.
    """

    name: str
    results: List[VariantResult]
    seeds: int
    loss: Optional[float]
    spread: Optional[float]
    train_loss: Optional[float]
    grad_norm: Optional[float]
    peak_mb: Optional[float]
    tokens_per_s: Optional[float]
    weight_norm: Optional[float]
    beside: Optional[Comparison] = None

    @property
    def state(self) -> str:
        """`done`, `2 of 3`, or what went wrong."""
        bad = [result for result in self.results if result.status != DONE]
        if bad:
            at = f" at {diverged_update(bad[0])}" if bad[0].status == DIVERGED else ""
            return f"{bad[0].status}{at}" + (f" ({len(bad)} of {self.seeds})" if self.seeds > 1 else "")
        return "done" if len(self.results) == self.seeds else f"{len(self.results)} of {self.seeds}"

    def as_dict(self) -> Dict[str, Any]:
        """For summary.json."""
        names = ("name", "loss", "spread", "train_loss", "grad_norm", "weight_norm", "peak_mb", "tokens_per_s", "state")
        beside = None if self.beside is None else asdict(self.beside)
        return {**{name: getattr(self, name) for name in names}, "beside_reference": beside}


def diverged_update(result: VariantResult) -> int:
    """The update at which it diverged, counted from 1 as `train` does; an engine that gives up leaves no loss of that one."""
    return diverged_at(result.losses) or len(result.losses) + 1


def rank(variants: Dict[str, List[Trial]], store: VariantStore, reference: Optional[str] = None) -> List[Row]:
    """The variants, best first; those in which a seed diverged or failed come last, and those without results after them.

    Args:
        reference: the variant that the others are compared with.
    """
    rows = [_row(name, trials, store.results([trial.id for trial in trials])) for name, trials in variants.items()]
    base = [result for row in rows if row.name == reference for result in row.results]
    rows = [row if row.name == reference else replace(row, beside=compare(row.results, base)) for row in rows]
    return sorted(rows, key=lambda row: (not row.results, row.loss is None, row.loss or 0.0))


def _row(name: str, trials: Sequence[Trial], results: Any) -> Row:
    done = [result for result in results if result.status == DONE]
    whole = bool(done) and len(done) == len(results)
    scores = [score(result) for result in done]
    norms = [norm for result in results for norm in result.grad_norms if math.isfinite(norm)]
    return Row(
        name,
        list(results),
        len(trials),
        statistics.mean(scores) if whole else None,
        max(scores) - min(scores) if whole and len(scores) > 1 else None,
        statistics.mean(result.loss for result in done) if whole else None,
        statistics.median(norms) if norms else None,
        _mean(result.peak_mb for result in results),
        _mean(result.tokens_per_s for result in results),
        _mean(result.weight_norm for result in results),
    )


def _mean(values: Any) -> Optional[float]:
    known = [value for value in values if value is not None]
    return statistics.mean(known) if known else None


def table(rows: Sequence[Row]) -> str:
    """Plain text, aligned, best variant first; differences to the reference where there is one, in percent of its loss."""
    compared = any(row.beside is not None for row in rows)
    titles = ["loss", "spread", "train loss", "grad norm", "weights", "peak MB", "tokens/s"]
    head = ["", "variant", *titles[:2], *(["difference", "its spread"] if compared else []), *titles[2:], "state"]
    lines = [head]
    for place, row in enumerate(rows):
        number = str(place + 1) if row.loss is not None else "-"
        values = [_text(v, d) for v, d in ((row.train_loss, 4), (row.grad_norm, 3), (row.weight_norm, 3))]
        values += [_text(row.peak_mb, 1), _text(row.tokens_per_s, 0)]
        lines.append([number, row.name, _text(row.loss, 4), _text(row.spread, 4), *_beside(row, compared), *values, row.state])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    left = (1, len(head) - 1)

    def joined(line: List[str]) -> str:
        return "  ".join(v.ljust(w) if i in left else v.rjust(w) for i, (v, w) in enumerate(zip(line, widths))).rstrip()

    return "\n".join(joined(line) for line in lines)


def _beside(row: Row, compared: bool) -> List[str]:
    one = row.beside
    if one is None:
        return ["-", "-"] if compared else []
    return [f"{one.relative:+.3%}", "-" if one.relative_spread is None else f"{one.relative_spread:.3%}"]


def seeds_note(seeds: int) -> Optional[str]:
    """What is to be said of a ranking by a single seed; None with more."""
    if seeds > 1:
        return None
    return "one seed has no spread, so this order is no ranking: train more seeds, for example `--seeds 3`"


def verdict_lines(verdicts: Sequence[Verdict]) -> List[str]:
    """What was expected and what came of it, a line each; nothing if nothing was expected."""
    lines = [f"{'verdict':<13} {'number':>9} {'limit':>9}  question"] if verdicts else []
    for one in verdicts:
        number, limit = ("-" if value is None else f"{value:.3%}" for value in (one.number, one.threshold))
        lines.append(f"{one.status:<13} {number:>9} {limit:>9}  {one.name}: {one.text}")
    return lines


def _text(value: Optional[float], digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def describe(result: VariantResult) -> str:
    """`mean seed 0: loss 3.2104 (12.3 s)`."""
    end = f"loss {score(result):.4f}" if result.status == DONE else f"{result.status}: {result.error}"
    return f"{result.axes['variant']} seed {result.axes['seed']}: {end} ({result.seconds:.1f} s)"


def write_csv(path: Path, variants: Dict[str, List[Trial]], store: VariantStore) -> None:
    """One line a variant and seed."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = "variant seed status loss train_loss median_grad_norm weight_norm peak_mb tokens_per_s seconds updates id"
    writer.writerow(head.split())
    for name, trials in variants.items():
        for trial in trials:
            for result in store.results([trial.id]):
                norms = [norm for norm in result.grad_norms if math.isfinite(norm)]
                writer.writerow(
                    [
                        *(name, trial.axes["seed"], result.status, score(result), result.loss),
                        statistics.median(norms) if norms else "",
                        *("" if v is None else v for v in (result.weight_norm, result.peak_mb, result.tokens_per_s)),
                        *(round(result.seconds, 2), len(result.losses), result.id),
                    ]
                )
    write_atomic(path, text.getvalue())


def smooth(values: Sequence[float], points: int = POINTS) -> Dict[int, float]:
    """{update: mean of the stretch of updates that ends there}, at most about `points` of them; infinities end the curve."""
    length = max(1, -(-len(values) // points))
    found: Dict[int, float] = {}
    for start in range(0, len(values), length):
        part = [value for value in values[start : start + length] if math.isfinite(value)]
        if not part:
            break
        found[start + len(values[start : start + length])] = math.fsum(part) / len(part)
    return found


def plot(path: Path, variants: Dict[str, List[Trial]], store: VariantStore, title: str) -> None:
    """Loss and gradient norm against the update: a line a variant (mean over seeds), a band from the lowest to the highest."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), dpi=110)
    FigureCanvasAgg(figure)
    losses, norms = figure.subplots(1, 2)
    for number, (name, trials) in enumerate(variants.items()):
        results = store.results([trial.id for trial in trials])
        _curve(losses, results, lambda result: result.losses, name, number)
        _curve(norms, results, lambda result: result.grad_norms, name, number)
    losses.set_ylabel("training loss (nats per token)")
    norms.set_ylabel("gradient norm before clipping")
    norms.set_yscale("log")
    for axes in (losses, norms):
        axes.set_xlabel("weight updates")
        axes.grid(True, alpha=0.3)
    losses.legend(fontsize=8)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    with disk_guard(f"{path} was not drawn"):
        figure.savefig(str(path))


def _curve(axes: Any, results: Any, values: Callable[[VariantResult], List[float]], name: str, number: int) -> None:
    curves = [smooth(values(result)) for result in results]
    curves = [curve for curve in curves if curve]
    if not curves:
        return
    at = sorted(min(curves, key=len))
    colour, style = f"C{number % 10}", ("-", "--", ":")[number // 10 % 3]
    mean = [statistics.mean(curve[x] for curve in curves if x in curve) for x in at]
    axes.plot(at, mean, style, color=colour, linewidth=1.3, label=name)
    if len(curves) > 1:
        low = [min(curve[x] for curve in curves if x in curve) for x in at]
        high = [max(curve[x] for curve in curves if x in curve) for x in at]
        axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
    if any(result.status == DIVERGED for result in results):
        axes.plot(at[-1], mean[-1], "x", color=colour)
