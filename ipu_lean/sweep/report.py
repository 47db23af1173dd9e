"""What a sweep leaves in its directory besides the trials: results.csv, the table for people, and two plots."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Tuple

from ipu_lean.mup.transfer import Optimum
from ipu_lean.sweep.grid import Trial, lr_text
from ipu_lean.sweep.judge import Group
from ipu_lean.sweep.results import TrialResult
from ipu_lean.train.files import write_atomic


def write_csv(path: Path, trials: Sequence[Trial], results: Mapping[str, TrialResult]) -> None:
    """A row a trial that has a result, in the order of the grid; `valid_NAME` where trials were evaluated."""
    axes = list(trials[0].axes)
    sets = sorted({name for result in results.values() for name in result.valid})
    columns = ["id", *axes, "status", "loss", *(f"valid_{name}" for name in sets), "updates", "seconds", "executor", "error"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for trial in trials:
        result = results.get(trial.id)
        if result is not None:
            valid = [repr(result.valid[name]) if name in result.valid else "" for name in sets]
            head = [trial.id, *(trial.axes[name] for name in axes), result.status, repr(result.loss)]
            writer.writerow([*head, *valid, len(result.losses), f"{result.seconds:.2f}", result.executor, result.error or ""])
    write_atomic(path, text.getvalue())


# -- the table ---------------------------------------------------------------------------------------------------------
def format_table(groups: Sequence[Group], counted: Mapping[str, int], seeds: int) -> str:
    """Losses by size and learning rate, the optimum of each size, and every verdict."""
    parts = [_group_table(group, seeds) for group in groups]
    state = ", ".join(f"{count} {name}" for name, count in counted.items() if name != "trials" and count)
    parts.append(f"{counted['trials']} trials: {state or 'none'}")
    return "\n\n".join(parts)


def _group_table(group: Group, seeds: int) -> str:
    lrs = sorted({row.lr for row in group.rows})
    head = [group.axis, *map(lr_text, lrs), "optimum"]
    lines = [head]
    for one in group.optima:
        cells = [_loss_text(one.means.get(lr)) + ("*" if lr == one.best_lr else " ") for lr in lrs]
        lines.append([f"{one.size:g}", *cells, optimum_text(one)])
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    over = f"mean of {seeds} seeds" if seeds > 1 else "one seed, so no error is known"
    text = [f"{group.title}: loss by learning rate ({over}; * the lowest)"]
    text += ["  ".join(cell.rjust(width) for cell, width in zip(line[:-1], widths)) + f"  {line[-1]}" for line in lines]
    text += [f"{verdict.name}: {verdict.status}: {verdict.text}" for verdict in group.verdicts]
    return "\n".join(text)


def optimum_text(one: Optimum) -> str:
    """`2^-7.31 ± 0.05`, or why there is none."""
    if one.log2_lr is None:
        return f"none: {one.problem}"
    return f"2^{one.log2_lr:.2f}" + ("" if one.error is None else f" ± {one.error:.2f}")


def _loss_text(loss: Any) -> str:
    if loss is None:
        return "-"
    return f"{loss:.4f}" if math.isfinite(loss) else "diverged"


# -- the plots ---------------------------------------------------------------------------------------------------------
MOST_PANELS = 24
"""Groups that are drawn; the table has all of them."""


def plot_transfer(groups: Sequence[Group], path: Path, title: str) -> None:
    """Loss against log2 lr, a curve a size with its minimum marked; parametrisations side by side, cells below each other."""
    title, groups = _drawn(title, groups)
    columns = list(dict.fromkeys(group.parametrization for group in groups))
    cells = list(dict.fromkeys((group.axis, repr(group.cell)) for group in groups))
    figure, panels = _figure(len(cells), len(columns), title)
    for group in groups:
        axes = panels[cells.index((group.axis, repr(group.cell)))][columns.index(group.parametrization)]
        _curves(axes, group)
    finite = [one.loss for group in groups for one in group.optima if math.isfinite(one.loss)]
    means = [loss for group in groups for one in group.optima for loss in one.means.values() if math.isfinite(loss)]
    if finite:
        low, high = min(finite), max(finite)
        top = min(max(means), high + 4 * max(high - low, 0.02 * abs(high)))
        for row in panels:
            for axes in row:
                axes.set_ylim(low - 0.08 * (top - low + 1e-9), top + 0.02 * (top - low + 1e-9))
    figure.savefig(str(path))


def _curves(axes: Any, group: Group) -> None:
    colours = _colours(len(group.optima))
    for one, colour in zip(group.optima, colours):
        points = [(math.log2(lr), loss) for lr, loss in one.means.items() if math.isfinite(loss)]
        xs, ys = zip(*points) if points else ((), ())
        axes.plot(xs, ys, marker="o", markersize=3, color=colour, label=f"{group.axis} {one.size:g}")
        if one.best_lr is not None:
            at = math.log2(one.best_lr) if one.log2_lr is None else one.log2_lr
            axes.plot([at], [one.loss], marker="*", markersize=13, color=colour, markeredgecolor="black", linestyle="none")
            axes.axvline(at, color=colour, linewidth=0.7, alpha=0.5)
    slope = group.found.slope
    axes.set_title(group.title + ("" if slope is None else f"\noptimum {slope:+.2f} log2 per doubling"), fontsize=9)
    axes.set_xlabel("log2 learning rate")
    axes.set_ylabel("training loss at the end (nats per token)")
    axes.grid(True, alpha=0.3)
    if group.optima:
        axes.legend(fontsize=7)


def plot_steps(
    groups: Sequence[Group], trials: Sequence[Trial], results: Mapping[str, TrialResult], path: Path, title: str
) -> None:
    """Loss against updates at each size's best learning rate (mean over seeds, smoothed): is bigger better all along?"""
    title, groups = _drawn(title, groups)
    figure, panels = _figure(1, len(groups), title)
    for group, axes in zip(groups, panels[0]):
        for one, colour in zip(group.optima, _colours(len(group.optima))):
            curves = [results[trial.id].losses for trial in trials if trial.id in results and _belongs(trial, group, one)]
            curves = [curve for curve in curves if len(curve) == max(map(len, curves))]
            if curves:
                mean = [math.fsum(values) / len(values) for values in zip(*curves)]
                axes.plot(range(1, len(mean) + 1), _smooth(mean), color=colour, label=f"{group.axis} {one.size:g}", linewidth=1.2)
        axes.set_title(group.title, fontsize=9)
        axes.set_xlabel("weight updates")
        axes.set_ylabel("training loss (nats per token)")
        axes.grid(True, alpha=0.3)
        if axes.lines:
            axes.legend(fontsize=7)
    figure.savefig(str(path))


def _drawn(title: str, groups: Sequence[Group]) -> Tuple[str, Sequence[Group]]:
    if len(groups) <= MOST_PANELS:
        return title, groups
    return f"{title} (the first {MOST_PANELS} of {len(groups)} groups)", groups[:MOST_PANELS]


def _belongs(trial: Trial, group: Group, one: Optimum) -> bool:
    same = trial.axes["parametrization"] == group.parametrization and trial.axes[group.axis] == one.size
    return same and trial.axes["lr"] == one.best_lr and all(trial.axes[key] == value for key, value in group.cell.items())


def _smooth(values: Sequence[float]) -> List[float]:
    """Mean over a twentieth of the updates on either side."""
    reach = len(values) // 20
    parts = (values[max(0, index - reach) : index + reach + 1] for index in range(len(values)))
    return [math.fsum(part) / len(part) for part in parts]


def _figure(rows: int, columns: int, title: str) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Figure and canvas by hand: pyplot would pick (and keep) a backend for the whole process.
    figure = Figure(figsize=(0.8 + 4.6 * columns, 0.6 + 3.6 * rows), dpi=110, constrained_layout=True)
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    return figure, figure.subplots(rows, columns, squeeze=False, sharey=True)


def _colours(count: int) -> List[Any]:
    from matplotlib import cm

    return [cm.viridis(0.05 + 0.85 * index / max(1, count - 1)) for index in range(count)]


def as_artifacts(paths: Dict[str, Path]) -> Dict[str, str]:
    """The files that are there."""
    return {name: str(path) for name, path in paths.items() if path.exists()}
