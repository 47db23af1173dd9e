"""Pictures of a coordinate check: both axes log2, a panel a step, a curve a module; muP above the standard parametrisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from ipu_lean.mup.figures import Coordinate, Figures, TensorFigure, grouped
from ipu_lean.mup.judge import kind_of
from ipu_lean.train.files import disk_guard

PANELS = 6
Series = Tuple[str, List[int], List[float]]


def plot_coordinates(path: Path, rows: Sequence[Tuple[str, Optional[Figures]]], value: str, title: str) -> Optional[Path]:
    """`value` (a field of `Coordinate`) against size: a row of panels for each of `rows` (name, figures), a column a step."""
    shown = [(name, figures) for name, figures in rows if figures is not None and figures.coordinates]
    if not shown:
        return None
    steps = panel_steps(shown[0][1].steps(), start=value in ("mean_abs", "rms"))
    if not steps:
        return None
    panels = [
        [(f"{name}, t = {step}", module_series(figures, step, lambda row: float(getattr(row, value)))) for step in steps]
        for name, figures in shown
    ]
    return draw(path, panels, shown[0][1].axis, title)


def plot_updates(path: Path, rows: Sequence[Tuple[str, Optional[Figures]]]) -> Optional[Path]:
    """Root mean square of every tensor's first update against size; hidden matrices solid, others dashed."""
    shown = [(name, figures) for name, figures in rows if figures is not None and figures.tensors]
    if not shown:
        return None
    panels = [[(f"{name}, first update", tensor_series(figures)) for name, figures in shown]]
    title = "weight updates |dW|, root mean square (solid: hidden matrices, under muP of power -1; dashed: all others)"
    return draw(path, panels, shown[0][1].axis, title)


def panel_steps(steps: Sequence[int], start: bool) -> List[int]:
    """0 (if asked for), 1, 2, 4, 8, … and the last, at most `PANELS`."""
    last = max(steps, default=0)
    chosen = sorted({step for step in steps if step & (step - 1) == 0 and (start or step)} | ({last} if last else set()))
    return chosen if len(chosen) <= PANELS else [*chosen[: PANELS - 2], *chosen[-2:]]


def module_series(figures: Figures, step: int, value: Callable[[Coordinate], float]) -> List[Series]:
    """A series a module: sizes, and means over seeds."""
    rows = [row for row in figures.coordinates if row.step == step]
    return [(name, *_means(part, value)) for name, part in grouped(rows, lambda row: row.module).items()]


def tensor_series(figures: Figures) -> List[Series]:
    """A series a tensor; the name of one that is no hidden matrix ends in a star."""
    found = []
    for name, part in grouped(figures.tensors, lambda row: row.name).items():
        found.append((name if kind_of(part) == "hidden" else f"{name}*", *_means(part, _first)))
    return found


def _first(row: TensorFigure) -> float:
    return row.first


def _means(rows: Sequence[Any], value: Callable[[Any], float]) -> Tuple[List[int], List[float]]:
    by_size: Dict[int, List[float]] = {}
    for row in rows:
        by_size.setdefault(row.size, []).append(value(row))
    points = {size: sum(found) / len(found) for size, found in sorted(by_size.items())}
    kept = {size: mean for size, mean in points.items() if mean > 0 and mean < float("inf")}  # zero has no logarithm
    return list(kept), list(kept.values())


def draw(path: Path, panels: Sequence[Sequence[Tuple[str, List[Series]]]], axis: str, title: str) -> Path:
    """Rows of panels with one common range of y."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Figure and canvas by hand: pyplot would pick (and keep) a backend for the whole process.
    rows, columns = len(panels), max(len(row) for row in panels)
    figure = Figure(figsize=(max(6.0, 2.6 * columns + 2.2), 2.9 * rows + 0.6), dpi=110)
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    names = list(dict.fromkeys(name for row in panels for _, series in row for name, _, _ in series))
    for place, row in enumerate(panels):
        for column, (heading, series) in enumerate(row):
            axes = grid[place][column]
            for name, sizes, values in series:
                number = names.index(name)
                style = "--" if name.endswith("*") else "-"
                axes.plot(sizes, values, style, marker=".", color=f"C{number % 10}", linewidth=1.0, markersize=3, label=name)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.set_title(heading, fontsize=8)
            axes.grid(True, alpha=0.3)
            axes.tick_params(labelsize=7)
            if place == rows - 1:
                axes.set_xlabel(axis, fontsize=8)
    handles = {label: handle for axes in grid.flat for handle, label in zip(*axes.get_legend_handles_labels())}
    if len(handles) <= 24:
        figure.legend(handles.values(), handles.keys(), loc="center right", fontsize=6)
        figure.subplots_adjust(left=0.7 / figure.get_figwidth(), right=1.0 - 1.9 / figure.get_figwidth())
    figure.suptitle(title, fontsize=9)
    with disk_guard(f"{path} was not drawn"):
        figure.savefig(str(path))
    return path
