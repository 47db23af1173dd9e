"""The comparison as text."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from ipu_lean.train.memory.footprint import KINDS

_SHORT = {"compensation": "kept"}
_MEANS = 0.05  # of the bytes a parameter: what may be something else if they are to say anything about a model


def format_table(metrics: Dict[str, Any]) -> str:
    """Bytes a parameter by kind, then what they come to in gigabytes (a small model: megabytes)."""
    count = metrics["parameters"]
    unit, scale = ("GB", 1e9) if count >= 1e8 else ("MB", 1e6)
    size = f"micro-batch of {metrics['rows']} rows" + (f" x {metrics['seq']} tokens" if metrics["seq"] > 1 else "")
    lines = [
        f"{count:,} parameters, the largest tensor has {metrics['largest']:,}; {size}; {metrics['device']}",
        "",
        "bytes a parameter; gradients: the most alive at once; kept: what a 16-bit weight cannot hold",
        *_aligned([_head(), *(_bytes(row, count) for row in metrics["modes"]), *_ipu_row(metrics["ipu"])]),
        *_remark(metrics),
        "",
        f"{unit}; copies: of weights, by autocast or to join or scale matrices; peak: of a whole update",
        *_aligned([_size_head(), *(_sizes(row, scale) for row in metrics["modes"] if row["predicted"])]),
    ]
    refused = [f"{row['mode']}: {row['status']}: {row['reason']}" for row in metrics["modes"] if row["status"] != "ok"]
    return "\n".join([*lines, *([""] if refused else []), *refused, *_plan_line(metrics["ipu"])])


def means_from(rows: List[Dict[str, Any]]) -> int:
    """Parameters, to two digits, from which what a process holds beside its tensors is at most 5 % of the measured bytes, if the
    model has as many tensors; 0 if nothing was measured."""
    found = [row for row in rows if row["measured"] is not None]
    least = max([0.0, *(row["measured"]["other"] / _MEANS / row["predicted"]["bytes_per_parameter"] for row in found)])
    return int(float(f"{least:.1e}"))


def _remark(metrics: Dict[str, Any]) -> List[str]:
    """A sentence for models that are too small for what a process holds to say much about them."""
    least = means_from(metrics["modes"])
    if least <= metrics["parameters"]:
        return []
    other = max(row["measured"]["other"] for row in metrics["modes"] if row["measured"] is not None)
    return [
        f"up to {other / 1e6:.2f} MB of what was measured are Python's objects and pages begun, not tensors: "
        f"with so many tensors, `off`, like a measured peak, says something from about {least:,} parameters on"
    ]


def _head() -> List[str]:
    return ["mode", *(_SHORT.get(kind, kind) for kind in KINDS), "predicted", "measured", "off"]


def _bytes(row: Dict[str, Any], count: int) -> List[str]:
    """One mode, by formula; the sum also as measured."""
    formula, found = row["predicted"], row["measured"]
    if formula is None:
        return [row["mode"], *["-"] * (len(KINDS) + 3)]
    measured = ["-", "-"] if found is None else [f"{found['bytes_per_parameter']:.2f}", f"{100 * row['difference']:+.1f} %"]
    return [row["mode"], *(f"{formula[kind] / count:.2f}" for kind in KINDS), f"{formula['bytes_per_parameter']:.2f}", *measured]


def _size_head() -> List[str]:
    pairs = [f"{name} {what}" for name in ("held", "copies", "activations", "peak") for what in ("predicted", "measured")]
    return ["mode", *pairs]


def _sizes(row: Dict[str, Any], scale: float) -> List[str]:
    formula, found = row["predicted"], row["measured"] or {}
    cells = [row["mode"]]
    for name in ("held", "copies", "activations", "peak"):
        cells += [_text(formula[name], scale), _text(found.get(name), scale)]
    return cells


def _text(value: Optional[float], scale: float) -> str:
    return "-" if value is None else f"{value / scale:.2f}"


def _ipu_row(ipu: Dict[str, Any]) -> List[List[str]]:
    if ipu["status"] != "ok":
        return []
    formula = ipu["predicted"]
    count = formula["weights"] / 2
    return [[ipu["mode"], *(f"{formula[kind] / count:.2f}" for kind in KINDS), f"{formula['bytes_per_parameter']:.2f}", "-", "-"]]


def _plan_line(ipu: Dict[str, Any]) -> List[str]:
    if ipu["status"] != "ok":
        return ["", f"fp16-ipu: {ipu['reason']}"]
    plan = ipu["plan"]
    where = f"{plan['ipus']} IPU{'' if plan['ipus'] == 1 else 's'}"
    return [
        "",
        f"fp16-ipu: on {where} the fullest holds {plan['fullest_bytes'] / 2**20:.0f} MiB with activations: "
        f"{plan['verdict']} (`ipu-lean plan` says more)",
    ]


def _aligned(rows: List[List[str]]) -> List[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]).rstrip() for row in rows]
