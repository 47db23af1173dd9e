"""The plan as a picture: a bar an IPU, its items stacked, and the limits."""

from __future__ import annotations

from pathlib import Path

from ipu_lean.ipu.plan.machine import FITS, MEMORY, TIGHT
from ipu_lean.ipu.plan.memory import ITEMS
from ipu_lean.ipu.plan.plan import Plan

_MIB = 2**20
_COLOURS = ("#4c72b0", "#8fb0e0", "#937860", "#dd8452", "#c44e52", "#8172b3", "#ccb974", "#d0d0d0")


def plot_plan(plan: Plan, path: Path) -> Path:
    """MiB of each item on each IPU; solid lines are what the limits say of bytes before temporaries, dashed after."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Figure and canvas by hand: pyplot would pick (and keep) a backend for the whole process.
    figure = Figure(figsize=(max(6.0, 3.4 + 0.5 * len(plan.ipus)), 4.4), dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(1, 1, 1)
    places = [row.ipu for row in plan.ipus]
    below = [0.0] * len(places)
    for name, colour in zip(ITEMS, _COLOURS):
        heights = [row.items[name] / _MIB for row in plan.ipus]
        axes.bar(places, heights, bottom=below, color=colour, label=name, width=0.75)
        below = [low + height for low, height in zip(below, heights)]
    axes.axhline(MEMORY / _MIB, color="black", linewidth=1.2)
    for limit, colour in ((FITS, "green"), (TIGHT, "firebrick")):
        axes.axhline(limit.before * MEMORY / _MIB, color=colour, linewidth=0.9)
        axes.axhline(limit.after * MEMORY / _MIB, color=colour, linewidth=0.9, linestyle="--")
    axes.set_xticks(places)
    axes.set_xlabel("IPU of a replica")
    axes.set_ylabel("MiB")
    axes.set_title(f"{plan.workload.name}: {plan.verdict} (black: {MEMORY // _MIB} MiB; green: fits; red: tight)", fontsize=9)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.tight_layout()
    figure.savefig(str(path))
    return path
