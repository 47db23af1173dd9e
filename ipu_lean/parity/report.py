"""What `parity` shows: a table, a picture, a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, List

from ipu_lean.parity.compare import KINDS, Comparison, Row
from ipu_lean.parity.trace import Trace
from ipu_lean.train.files import disk_guard, write_atomic


def format_table(comparison: Comparison, reference: Trace, candidate: Trace, every: bool = False) -> str:
    """Losses by step, then the tensors: the worst of each kind and all that differ, or `every` one."""
    lines = [f"reference: {_side(reference)}", f"candidate: {_side(candidate)}", ""]
    lines += _loss_lines(comparison, reference, candidate, every)
    lines += ["", f"{'kind':<11}{'step':>5} {'relative':>9} {'limit':>8} {'max abs':>9} {'1-cosine':>9}  {'status':<9} tensor"]
    for kind in KINDS:
        for row in _chosen(comparison, kind, every):
            lines.append(_line(row))
    lines += ["", *_remarks(comparison, reference, candidate)]
    return "\n".join(lines)


def _side(trace: Trace) -> str:
    facts = trace.facts
    shape = f"{trace.updates_per_call} update{'s' if trace.updates_per_call > 1 else ''} a call"
    return f"{facts['device']} ({facts['backend']}), {facts['precision']}, {facts['optimizer']}, {shape}"


def _loss_lines(comparison: Comparison, reference: Trace, candidate: Trace, every: bool) -> List[str]:
    rows = [row for row in comparison.rows if row.kind == "loss"]
    shown = rows if every or len(rows) <= 12 else [*rows[:5], *rows[-5:]]
    lines = [f"{'step':>6}  {'loss (reference)':>18}  {'loss (candidate)':>18}  {'relative':>9}"]
    for row in shown:
        if shown is not rows and row is rows[-5]:
            lines.append(f"{'...':>6}")
        values = [trace.losses[row.step - 1] for trace in (reference, candidate)]
        mark = "" if row.status == "ok" else f"  {row.status}"
        lines.append(f"{row.step:>6}  {values[0]:>18.9f}  {values[1]:>18.9f}  {row.relative:>9.1e}{mark}")
    return lines


def _chosen(comparison: Comparison, kind: str, every: bool) -> List[Row]:
    rows = [row for row in comparison.rows if row.kind == kind]
    if every or kind == "loss":
        return rows if every else [row for row in [comparison.worst(kind)] if row is not None]
    bad = [row for row in rows if row.status == "differs"][:12]
    worst = comparison.worst(kind)
    quiet = [row for row in rows if row.status in ("zero", "muted", "left out")]
    last = max((row.step for row in quiet), default=0)
    return [*bad, *([worst] if worst is not None and worst not in bad else []), *(row for row in quiet if row.step == last)]


def _line(row: Row) -> str:
    judged = f"{row.limit:>8.0e}" if row.status in ("ok", "differs") else f"{'-':>8}"
    angle = f"{max(0.0, 1.0 - row.cosine):>9.1e}" if row.cosine == row.cosine else f"{'-':>9}"
    return f"{row.kind:<11}{row.step:>5} {row.relative:>9.1e} {judged} {row.max_abs:>9.1e} {angle}  {row.status:<9} {row.name}"


def _remarks(comparison: Comparison, reference: Trace, candidate: Trace) -> List[str]:
    lines = []
    start = reference.start
    if start.drawn:
        lines.append(f"drawn at random, since zeros would mute gradients: {_listed(start.drawn)}")
    if start.zero_gradients:
        lines.append(f"true gradient is zero (float64), so compared absolutely: {_listed(start.zero_gradients)}")
    left = comparison.named("left out")
    if left:
        lines.append(f"weights left out, since rounding alone moves them as far on the reference's device: {_listed(left)}")
    lines.append(f"gradients: reference by {reference.facts['gradients']}, candidate by {candidate.facts['gradients']}")
    if comparison.first is not None:
        first = comparison.first
        lines.append(f"first difference: {first.kind} `{first.name}` at step {first.step}, {first.relative:.2e} relative")
    lines += [f"diagnosis: {comparison.diagnosis}", f"verdict: {comparison.verdict}"]
    return lines


def _listed(names: List[str]) -> str:
    """The first few; parity.json has all of them."""
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def write_report(path: Path, comparison: Comparison, reference: Trace, candidate: Trace) -> Dict[str, str]:
    """parity.json, parity.txt and parity.png in `path`; returns their names by kind."""
    with disk_guard(f"the report in {path} was not written"):
        path.mkdir(parents=True, exist_ok=True)
    table = format_table(comparison, reference, candidate, every=True)
    content = {**comparison.as_dict(), "reference": reference.facts, "candidate": candidate.facts}
    write_atomic(path / "parity.json", json.dumps(content, indent=1) + "\n")
    write_atomic(path / "parity.txt", table + "\n")
    plot(comparison, path / "parity.png", f"{_side(reference)}  |  {_side(candidate)}")
    return {"report": str(path / "parity.json"), "table": str(path / "parity.txt"), "plot": str(path / "parity.png")}


def plot(comparison: Comparison, path: Path, title: str) -> None:
    """Relative differences: losses and the worst weight by step, and every activation and gradient, each with its limit."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Figure and canvas by hand: pyplot would pick (and keep) a backend for the whole process.
    figure = Figure(figsize=(11, 4.4), dpi=110)
    FigureCanvasAgg(figure)
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    for kind, colour in (("loss", "C0"), ("weight", "C1")):
        worst: Dict[int, float] = {}
        for row in comparison.rows:
            if row.kind == kind and row.status in ("ok", "differs"):
                worst[row.step] = max(worst.get(row.step, 0.0), row.relative)
        left.plot(list(worst), [_visible(value) for value in worst.values()], "o-", color=colour, markersize=3,
                  label=kind if kind == "loss" else "weight (worst tensor)")
        left.axhline(getattr(comparison.tolerances, kind), color=colour, linestyle="--", linewidth=0.8)
    _label(left, "weight updates", "relative difference")
    for kind, colour in (("activation", "C2"), ("gradient", "C3")):
        rows = [row for row in comparison.rows if row.kind == kind and row.status in ("ok", "differs")]
        right.plot(range(len(rows)), [_visible(row.relative) for row in rows], "o", color=colour, markersize=3, label=kind)
        right.axhline(getattr(comparison.tolerances, kind), color=colour, linestyle="--", linewidth=0.8)
    _label(right, "tensor, in forward order", "")
    figure.suptitle(f"{title}: {comparison.verdict}", fontsize=9)
    figure.tight_layout()
    with disk_guard(f"{path} was not drawn"):
        figure.savefig(str(path))


def _visible(value: float) -> float:
    """Within a logarithmic axis: zero and infinity have no place on it."""
    return min(max(value, 1e-10), 1e3) if value == value else 1e3


def _label(axes: Any, x: str, y: str) -> None:
    axes.set_yscale("log")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8)
