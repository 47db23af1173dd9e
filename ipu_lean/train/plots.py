"""loss.png: the run's curves, drawn without a display."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional

from ipu_lean.train.files import disk_guard


def plot_losses(records: List[Dict[str, Any]], path: Path, title: str) -> Optional[Path]:
    """Training and validation loss against the update, from the records of metrics.jsonl; returns None if there is nothing
    to draw.
    """
    splits: Dict[str, List[Dict[str, Any]]] = {}
    for record in records:
        if record.get("loss") is not None:
            splits.setdefault(record["split"], []).append(record)
    if not splits:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Figure and canvas by hand: pyplot would pick (and keep) a backend for the whole process.
    figure = Figure(figsize=(7, 4.2), dpi=110)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(1, 1, 1)
    for name, rows in splits.items():
        style = {"linewidth": 1.0, "alpha": 0.7} if name == "train" else {"linewidth": 1.6, "marker": "o", "markersize": 3.5}
        axes.plot([row["step"] for row in rows], [row["loss"] for row in rows], label=name, **style)
    axes.set_xlabel("weight updates")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title, fontsize=10)
    axes.grid(True, alpha=0.3)
    axes.legend()
    figure.tight_layout()
    with disk_guard(f"{path} was not drawn"):
        figure.savefig(str(path))
    return path
