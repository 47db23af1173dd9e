"""What `coord-check` shows and keeps: a table, CSV files, JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

from ipu_lean.mup.diagnosis import Diagnosis
from ipu_lean.mup.figures import Coordinate, Figures, Signature, TensorFigure, grouped, slope_of
from ipu_lean.mup.judge import Finding, judged_steps
from ipu_lean.mup.verdict import Verdict, signed
from ipu_lean.train.files import disk_guard, write_atomic

_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass
class Outcome:
    """Everything that one command measured and concluded.

    Attributes:
        settings: widths, steps, seeds, lr, rows, device, optimizer. mup, control: figures over width (control: the standard
            parametrisation, None if that is what was checked). deep, shallow: over depth, with and without CompleteP.
    """

    settings: Dict[str, Any]
    mup: Figures
    control: Optional[Figures] = None
    deep: Optional[Figures] = None
    plain_depth: Optional[Figures] = None
    findings: List[Finding] = field(default_factory=list)
    verdicts: List[Verdict] = field(default_factory=list)
    diagnoses: List[Diagnosis] = field(default_factory=list)


def format_table(outcome: Outcome, verdict: str) -> str:
    """Slopes of activations, slopes of tensors, verdicts, diagnosis."""
    settings = outcome.settings
    told = ", ".join(f"{key} {_listed(value)}" for key, value in settings.items())
    lines = [told, "", "Powers of the width: of x_0, then of x_t - x_0 at step t; beside them the standard parametrisation's."]
    lines += module_lines(outcome.mup, outcome.control)
    lines += ["", "Tensors: what they start with, their first update (and which that was), decay; the worst of equal layers."]
    lines += tensor_lines(outcome.findings)
    if outcome.deep is not None:
        lines += ["", "Powers of the depth, with CompleteP's multiplier beside none."]
        lines += module_lines(outcome.deep, outcome.plain_depth)
    lines += ["", f"{'verdict':<13} {'number':>8} {'limit':>7}  question"]
    for each in outcome.verdicts:
        lines.append(f"{each.status:<13} {_number(each.number):>8} {_number(each.threshold):>7}  {each.name}: {each.text}")
    lines += [f"diagnosis ({each.code}): {each.text}." for each in outcome.diagnoses]
    return "\n".join([*lines, f"verdict: {verdict}"])


def module_lines(one: Figures, other: Optional[Figures]) -> List[str]:
    """A line a module that all sizes have."""
    steps = judged_steps(one.steps())
    title = "".join(f"{'t=' + str(step):>8}" for step in steps)
    lines = [f"{'module':<26}{'x_0':>8}{title}" + (f"  |{'x_0':>8}{title}" if other is not None else "")]
    theirs = {} if other is None else grouped(other.coordinates, lambda row: row.module)
    for module, rows in grouped(one.coordinates, lambda row: row.module).items():
        if {row.size for row in rows} != set(one.sizes):
            continue
        line = f"{module:<26}{_slopes(rows, steps)}"
        lines.append(line + (f"  |{_slopes(theirs[module], steps)}" if module in theirs else ""))
    return lines


def _slopes(rows: Sequence[Coordinate], steps: Sequence[int]) -> str:
    start = slope_of([row for row in rows if row.step == 0], lambda row: row.rms)
    later = [slope_of([row for row in rows if row.step == step], lambda row: row.change) for step in steps]
    return "".join(f"{_number(value):>8}" for value in (start, *later))


def tensor_lines(findings: Sequence[Finding]) -> List[str]:
    """A line for each tensor's name, with equal layers in one."""
    merged: Dict[Tuple[str, str], Dict[str, Finding]] = {}
    for finding in findings:
        if finding.question in ("init", "updates", "decay"):
            slot = merged.setdefault((_LAYER.sub("*", finding.subject), finding.kind), {})
            known = slot.get(finding.question)
            if known is None or abs(finding.excess) > abs(known.excess):
                slot[finding.question] = finding
    width = max((len(name) for name, _ in merged), default=6) + 2
    lines = [f"{'tensor':<{width}}{'kind':<10}{'x_0':>8}{'update':>8}{'expected':>10}{'decay':>8}"]
    for (name, kind), found in merged.items():
        update = found.get("updates")
        values = [_number(found[key].slope) if key in found else "" for key in ("init", "updates", "decay")]
        expected = "" if update is None else f"{_number(update.expected)}@{update.step}"
        lines.append(f"{name:<{width}}{kind:<10}{values[0]:>8}{values[1]:>8}{expected:>10}{values[2]:>8}")
    return lines


def _number(value: Optional[float]) -> str:
    return "-" if value is None else signed(value)


def _listed(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def write_files(path: Path, outcome: Outcome, table: str, verdict: str) -> Dict[str, str]:
    """coord.txt, coord.json, coordinates.csv, tensors.csv, signatures.csv in `path`; returns their paths by kind."""
    parts = [("mup", outcome.mup), ("standard", outcome.control), ("depth", outcome.deep), ("depth-none", outcome.plain_depth)]
    figures = [(name, part) for name, part in parts if part is not None]
    with disk_guard(f"the report in {path} was not written"):
        path.mkdir(parents=True, exist_ok=True)
    content = {
        "verdict": verdict,
        "settings": outcome.settings,
        "verdicts": [each.as_dict() for each in outcome.verdicts],
        "diagnosis": [each.as_dict() for each in outcome.diagnoses],
        "findings": [asdict(finding) for finding in outcome.findings],
        "diverged": {name: part.diverged for name, part in figures if part.diverged},
    }
    files = {
        "coord.txt": table + "\n",
        "coord.json": json.dumps(content, indent=1) + "\n",
        "coordinates.csv": _csv(Coordinate, [(name, row) for name, part in figures for row in part.coordinates]),
        "tensors.csv": _csv(TensorFigure, [(name, row) for name, part in figures for row in part.tensors]),
        "signatures.csv": _csv(Signature, [(name, row) for name, part in figures for row in part.signatures]),
    }
    for name, text in files.items():
        write_atomic(path / name, text)
    kinds = {"coord.txt": "table", "coord.json": "report", "coordinates.csv": "coordinates", "tensors.csv": "tensors",
             "signatures.csv": "signatures"}  # fmt: skip
    return {kinds[name]: str(path / name) for name in files}


def _csv(kind: type, rows: Sequence[Tuple[str, Any]]) -> str:
    """One line a row, headed by the field names; `run` says whose it is."""
    text = io.StringIO()
    names = [each.name for each in fields(kind)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", *names])
    for run, row in rows:
        writer.writerow([run, *(_cell(getattr(row, name)) for name in names)])
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return json.dumps(value) if isinstance(value, dict) else value
