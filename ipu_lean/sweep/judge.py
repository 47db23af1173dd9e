"""From results to answers: trials that ask one question together, their optima, and the verdict on all of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from ipu_lean.mup.transfer import Drift, Optimum, Row, decide, drift, judge_transfer
from ipu_lean.mup.verdict import Verdict, overall
from ipu_lean.sweep.grid import Trial
from ipu_lean.sweep.results import DIVERGED, DONE, FAILED, TrialResult

SIZES = ("width", "depth")


@dataclass(frozen=True)
class Group:
    """Trials that differ in one kind of size, learning rate and seed only.

    `axis`: `width` or `depth`, the size that varies (width where none does). `cell`: what they share on the other axes.
    """

    parametrization: str
    axis: str
    cell: Dict[str, Any]
    rows: List[Row]
    verdicts: List[Verdict] = field(default_factory=list)

    @property
    def found(self) -> Drift:
        """Optima and slope."""
        return drift(self.rows)

    @property
    def optima(self) -> Tuple[Optimum, ...]:
        """The best learning rate of each size."""
        return self.found.optima

    @property
    def title(self) -> str:
        """`mup` or `mup, depth 4, optimizer.weight_decay 0.1`."""
        return ", ".join([self.parametrization, *(f"{key} {value}" for key, value in self.cell.items())])

    @property
    def verdict(self) -> Optional[str]:
        """`pass`, `fail`, `inconclusive`, or None with a single size."""
        return decide(self.verdicts)

    def as_dict(self) -> Dict[str, Any]:
        """Plain JSON."""
        found = self.found
        return {
            "parametrization": self.parametrization,
            "axis": self.axis,
            "cell": self.cell,
            "verdict": self.verdict,
            "slope": found.slope,
            "slope_error": found.error,
            "noise": found.noise,
            "optima": [
                {
                    self.axis: one.size,
                    "log2_lr": one.log2_lr,
                    "log2_lr_error": one.error,
                    "best_lr": one.best_lr,
                    "loss": one.loss if one.best_lr is not None else None,
                    "problem": one.problem,
                }
                for one in found.optima
            ],
            "verdicts": [verdict.as_dict() for verdict in self.verdicts],
        }


def group_trials(trials: Sequence[Trial], results: Mapping[str, TrialResult]) -> List[Group]:
    """Groups in the order of the trials, each with its verdicts; the same sweep under the standard parametrisation is the
    control of a group under muP. Trials without result, and those that failed, are left out.
    """
    groups = []
    for axis in _axes(trials):
        cells: Dict[str, Group] = {}
        for trial in trials:
            cell = _cell(trial, axis, trials)
            key = json.dumps([trial.axes["parametrization"], cell])
            group = cells.setdefault(key, Group(trial.axes["parametrization"], axis, cell, []))
            result = results.get(trial.id)
            if result is not None and result.status in (DONE, DIVERGED):
                group.rows.append(Row(trial.axes[axis], trial.axes["lr"], trial.axes["seed"], result.loss))
        for group in cells.values():
            group.verdicts.extend(judge_transfer(group.rows, axis, _control(group, cells.values())))
            groups.append(group)
    return groups


def _axes(trials: Sequence[Trial]) -> List[str]:
    """The sizes that vary; width if none does."""
    varying = [axis for axis in SIZES if len({trial.axes[axis] for trial in trials}) > 1]
    return varying or ["width"]


def _cell(trial: Trial, axis: str, trials: Sequence[Trial]) -> Dict[str, Any]:
    """This trial's place on the other axes; a size that never varies goes without saying."""
    varying = _axes(trials)
    left_out = {axis, "lr", "seed", "parametrization", *(name for name in SIZES if name not in varying)}
    return {name: value for name, value in trial.axes.items() if name not in left_out}


def _control(group: Group, groups: Any) -> List[Row]:
    """The standard parametrisation's rows for a group under muP; depth has none, since nothing is known about it there."""
    if group.parametrization != "mup" or group.axis != "width":
        return []
    return [row for other in groups if other.parametrization == "standard" and other.cell == group.cell for row in other.rows]


def deciding(groups: Sequence[Group]) -> List[Group]:
    """The groups that the sweep is about: those under muP, or all where there are none."""
    return [group for group in groups if group.parametrization == "mup"] or list(groups)


def sweep_verdict(groups: Sequence[Group]) -> Optional[str]:
    """The verdict on the sweep; None if no size varies."""
    gates = [verdict for group in deciding(groups) for verdict in group.verdicts if decide([verdict]) is not None]
    return overall(gates) if gates else None


def worst(groups: Sequence[Group], status: str) -> Optional[Verdict]:
    """The first deciding verdict with this status."""
    for group in deciding(groups):
        for verdict in group.verdicts:
            if verdict.status == status and decide([verdict]) is not None:
                return verdict
    return None


def counts(trials: Sequence[Trial], results: Mapping[str, TrialResult]) -> Dict[str, int]:
    """Trials by status; `missing` are those without a result."""
    found = {"trials": len(trials), DONE: 0, DIVERGED: 0, FAILED: 0, "missing": 0}
    for trial in trials:
        result = results.get(trial.id)
        found["missing" if result is None else result.status] += 1
    return found
