"""The muP table of one model: what every tensor gets, and a text rendering of it."""
from __future__ import annotations

import re
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ipu_lean.mup.roles import Role

COLUMNS = ("name", "kind", "shape", "base_shape", "m_in", "m_out", "init_std", "forward_mult", "depth_mult", "lr", "decay", "eps")
_NUMBERED = re.compile(r"(?<=\.)\d+(?=\.)")


def explain_rows(
    roles: Mapping[str, Role],
    shapes: Mapping[str, Sequence[int]],
    base_shapes: Mapping[str, Sequence[Optional[int]]],
    settings: Mapping[str, Mapping[str, Any]],
) -> List[Dict[str, Any]]:
    """One dict a tensor, in the order of `roles`, with the keys of `COLUMNS` and `tied`.

    Args:
        shapes, base_shapes: by name; None in a base shape is a dimension that does not grow.
        settings: {name: {"lr", "weight_decay", "eps"}}, as `ipu_lean.optim.settings_by_name` reads them out of an optimizer,
            so that the table shows what will run and not a second computation of it. A key that is missing (SGD: eps) is None.
    """
    rows = []
    for name, role in roles.items():
        own = settings.get(name, {})
        rows.append(
            {
                "name": name,
                "kind": role.kind,
                "tied": role.tied,
                "shape": list(shapes[name]),
                "base_shape": list(base_shapes[name]),
                "m_in": role.m_in,
                "m_out": role.m_out,
                "init_std": None if role.init_std != role.init_std else role.init_std,
                "forward_mult": role.forward_mult,
                "depth_mult": role.depth_mult,
                "lr": own.get("lr"),
                "decay": own.get("weight_decay"),
                "eps": own.get("eps"),
            }
        )
    return rows


def collapse_rows(rows: Sequence[Mapping[str, Any]]) -> List[Dict[str, Any]]:
    """Rows equal but for a layer's number become one, `blocks.{0-23}.ffn.up.weight`, at the place of the first."""
    merged: Dict[Tuple[Any, ...], Tuple[Dict[str, Any], List[str]]] = {}
    for row in rows:
        first = _NUMBERED.search(row["name"])
        pattern = row["name"] if first is None else row["name"][: first.start()] + "{}" + row["name"][first.end() :]
        key = (pattern,) + tuple(str(value) for column, value in row.items() if column != "name")
        entry = merged.setdefault(key, (dict(row), []))
        if first is not None:
            entry[1].append(first.group())
    for key, (row, numbers) in merged.items():
        if len(numbers) > 1:
            row["name"] = key[0].replace("{}", "{" + _ranges([int(number) for number in numbers]) + "}", 1)
    return [row for row, _ in merged.values()]


def format_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A text table with the columns of `COLUMNS`, numbers to four digits, `-` for none, `*` after the name of a tied tensor."""
    cells = [list(COLUMNS)] + [[_cell(row, column) for column in COLUMNS] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(COLUMNS))]
    text = []
    for line in cells:
        padded = [cell.ljust(width) if i < 4 else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths))]
        text.append("  ".join(padded).rstrip())
    text.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(text)


def _cell(row: Mapping[str, Any], column: str) -> str:
    value = row[column]
    if column == "name":
        return f"{value} *" if row.get("tied") else str(value)
    if value is None:
        return "-"
    if isinstance(value, (list, tuple)):
        return "x".join("." if size is None else str(size) for size in value) or "scalar"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    parts: List[List[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
