"""memory.png: two bars a mode, predicted and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

from ipu_lean.train.files import disk_guard
from ipu_lean.train.memory.footprint import KINDS

_COLOURS = {
    "weights": "#4c72b0",
    "gradients": "#8fb0e0",
    "moments": "#937860",
    "compensation": "#dd8452",
    "copies": "#ccb974",
    "activations": "#55a868",
}


def plot_memory(metrics: Dict[str, Any], path: Path, name: str) -> Path:
    """Gigabytes (or megabytes) by kind: for each mode what the formula says (left) and what was measured (right, hatched)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in metrics["modes"] if row["predicted"]]
    unit, scale = ("GB", 1e9) if metrics["parameters"] >= 1e8 else ("MB", 1e6)
    # Figure and canvas by hand: pyplot would pick (and keep) a backend for the whole process.
    figure = Figure(figsize=(max(6.0, 2.2 + 0.8 * len(rows)), 5.0), dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(1, 1, 1)
    for side, offset, hatch in (("predicted", -0.2, None), ("measured", 0.2, "//")):
        shown = [(place, row[side]) for place, row in enumerate(rows) if row[side]]
        below: List[float] = [0.0] * len(shown)
        for kind in (*KINDS, "copies", "activations"):
            heights = [(part[kind] or 0) / scale for _, part in shown]
            label = kind if side == "predicted" else None
            places = [place + offset for place, _ in shown]
            style = {"color": _COLOURS[kind], "label": label, "hatch": hatch, "edgecolor": "white", "linewidth": 0.3}
            axes.bar(places, heights, 0.38, below, **style)
            below = [low + height for low, height in zip(below, heights)]
    axes.set_xticks(range(len(rows)))
    axes.set_xticklabels([row["mode"] for row in rows], rotation=40, ha="right", fontsize=8)
    axes.set_ylabel(unit)
    both = "predicted" if metrics["predicted_only"] else "left: predicted, right: measured"
    axes.set_title(f"{name}: {metrics['parameters']:,} parameters on {metrics['device']} ({both})", fontsize=9)
    axes.legend(fontsize=7)
    figure.tight_layout()
    with disk_guard(f"{path} was not drawn"):
        figure.savefig(str(path))
    return path
