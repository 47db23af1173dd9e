"""From figures to verdicts: does each thing that muP prescribes hold at these widths? Knows no model.

What is expected follows from shapes alone: an axis grows if its length differs between widths; a tensor with two growing axes
is a hidden matrix, any other an embedding, a readout or a vector (Yang et al. 2021, table 8, in the form of the mup package).

    question    of                            expected power of the width       (s: power with which the fan-in grows, usually 1)
    init        every tensor                  hidden -s/2, others 0
    scores      attention, queries drawn      -1/2 of the head size's power: 0 where heads keep their size
    readout     readout, all drawn            -s/2
    values      hidden activations, step 0    0
    updates     first update of every tensor  hidden -s, others 0 (Adam; of SGD the learning rates are judged)
    rates       learning rates                the same power at the last update as when the optimizer was built
    changes     x_t - x_0                     not above 0
    decay       share taken off per update    0

Values and changes of activations scatter, so fewer than three sizes leave them inconclusive; the others hold with two.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import List, Optional, Sequence

from ipu_lean.mup.figures import BRANCH, OUTPUT, STREAM, Coordinate, Figures, TensorFigure, grouped, scatter_of, slope_of
from ipu_lean.mup.verdict import FAIL, INCONCLUSIVE, PASS, Verdict, signed

# Each with its evidence in docs/coord-check.md.
INIT, INIT_ERRORS = 0.2, 4.0  # the second: in standard errors, where a small tensor scatters by more
SCORES = 0.2
READOUT = 0.1
VALUES = 0.3
UPDATES, VECTOR_UPDATES, LATE_UPDATES = 0.05, 0.3, 0.5
RATES = 0.05
DECAY = 0.05
GROWTH, SURE_GROWTH, SHRINKAGE = 0.20, 0.40, -0.35
FIRST_JUDGED = 4  # before that, what starts at zero has not reached every tensor
QUESTIONS = ("init", "scores", "readout", "values", "updates", "rates", "changes", "decay")


@dataclass(frozen=True)
class Finding:
    """One slope beside what it should be.

    Attributes:
        question: one of `QUESTIONS`. subject: a tensor or a module.
        kind: hidden, vector, embedding, input or readout of a tensor; a module's role.
        slope: None if it could not be taken. step: the update or step it is of. excess: slope - expected.
        ok: within the tolerance.
    """

    question: str
    subject: str
    kind: str
    slope: Optional[float]
    expected: float
    tolerance: float
    step: int = 0
    one_sided: bool = False

    @property
    def excess(self) -> float:
        return 0.0 if self.slope is None else self.slope - self.expected

    @property
    def ok(self) -> bool:
        return self.excess <= self.tolerance if self.one_sided else abs(self.excess) <= self.tolerance


def find(figures: Figures) -> List[Finding]:
    """Every slope over width that muP says something about."""
    found: List[Finding] = []
    steps = sorted(row.first_step for row in figures.tensors)
    for name, rows in grouped(figures.tensors, lambda row: row.name).items():
        found += _of_tensor(name, rows, figures.family, steps[len(steps) // 2])
    found += _of_signature(figures)
    for module, rows in grouped(figures.coordinates, lambda row: row.module).items():
        found += _of_module(module, rows, figures.steps())
    return found


def kind_of(rows: Sequence[TensorFigure]) -> str:
    """`hidden` if two axes grow, `vector` if there is one at most, else what the role calls it (`embedding` unless it says)."""
    shapes = sorted({row.shape for row in rows})
    if len(shapes[0]) < 2:
        return "vector"
    growing = [len({shape[axis] for shape in shapes}) > 1 for axis in range(len(shapes[0]))]
    if sum(growing) >= 2:
        return "hidden"
    return rows[0].label if rows[0].label in ("embedding", "input", "readout") else "embedding"


def axis_power(rows: Sequence[TensorFigure], axis: int) -> float:
    """The power of the size with which one axis grows (the last is a matrix's fan-in)."""
    return slope_of(rows, lambda row: float(row.shape[axis])) or 0.0


def axes(rows: Sequence[TensorFigure]) -> Sequence[int]:
    """The axes of a tensor."""
    return range(len(rows[0].shape))


def _of_tensor(name: str, rows: Sequence[TensorFigure], family: str, usual: int) -> List[Finding]:
    kind = kind_of(rows)
    power = axis_power(rows, -1) if kind == "hidden" else 0.0
    built = slope_of(rows, lambda row: row.rate_built)
    if family == "adam":
        moved = slope_of(rows, lambda row: row.first)
        tolerance = VECTOR_UPDATES if kind == "vector" else UPDATES
        if rows[0].first_step > usual:
            # Its gradient came through a matrix that had made one step from zero (keys, through queries), so it is so small that
            # even a good eps takes part of the update.
            tolerance = LATE_UPDATES
        update = Finding("updates", name, kind, moved, -power, tolerance, rows[0].first_step)
    else:
        # SGD's updates are as large as gradients, and those of a start with zeros vanish with the width where muP allows them to.
        expected = axis_power(rows, 0) - power if kind == "hidden" else max(axis_power(rows, axis) for axis in axes(rows))
        update = Finding("updates", name, kind, built, expected, UPDATES)
    scatter = 0.0 if kind == "vector" else INIT_ERRORS * scatter_of(rows)  # vectors start with constants
    found = [
        update,
        Finding("init", name, kind, slope_of(rows, lambda row: row.init), -0.5 * power, max(INIT, scatter)),
        Finding("decay", name, kind, slope_of(rows, lambda row: row.decay or 0.0), 0.0, DECAY),
    ]
    if built is not None:
        found.append(Finding("rates", name, kind, slope_of(rows, lambda row: row.rate), built, RATES))
    return [finding for finding in found if finding.slope is not None]


def _of_signature(figures: Figures) -> List[Finding]:
    found: List[Finding] = []
    rows = figures.signatures
    if not rows:
        return found
    heads = slope_of([row for row in rows if row.head_size], lambda row: float(row.head_size or 0))
    for name in rows[0].scores:
        value = slope_of(rows, lambda row, name=name: row.scores[name])  # type: ignore[misc]
        found.append(Finding("scores", name, "attention", value, -0.5 * (heads or 0.0), SCORES))
    readout = slope_of(rows, lambda row: row.readout or 0.0)
    if readout is not None:
        fan_in = slope_of(rows, lambda row: float(row.readout_fan_in or 0)) or 0.0
        found.append(Finding("readout", "readout", "readout", readout, -0.5 * fan_in, READOUT))
    return found


def _of_module(module: str, rows: Sequence[Coordinate], steps: Sequence[int]) -> List[Finding]:
    found = []
    role = rows[0].role
    by_step = grouped(rows, lambda row: str(row.step))
    if role != OUTPUT:
        found.append(Finding("values", module, role, slope_of(by_step["0"], lambda row: row.rms), 0.0, VALUES))
    for step in judged_steps(steps):
        value = slope_of(by_step.get(str(step), []), lambda row: row.change)
        found.append(Finding("changes", module, role, value, 0.0, GROWTH, step, one_sided=True))
    return found


def judged_steps(steps: Sequence[int]) -> List[int]:
    """4, 8, 16, … and the last; the last alone if there are fewer than 4."""
    last = max(steps, default=0)
    powers = [step for step in steps if step >= FIRST_JUDGED and step & (step - 1) == 0]
    return sorted({*powers, last} - {0})


def judge(figures: Figures, control: Optional[Figures] = None) -> List[Verdict]:
    """A verdict a question. `control`: the standard parametrisation's figures, which must not look like muP's.

    A run that ended in a loss that was not finite fails what it was to show.
    """
    findings = find(figures)
    questions = ("updates", "rates", "init", "scores", "readout", "values")
    verdicts = [_exact(question, _of(findings, question)) for question in questions]
    verdicts[-1] = _unless_few(verdicts[-1], figures)
    verdicts.append(_changes(findings, figures, control))
    if any(row.decay is not None for row in figures.tensors):
        verdicts.append(_exact("decay", _of(findings, "decay")))
    return [verdict for verdict in verdicts if verdict is not None]


def _of(findings: Sequence[Finding], question: str) -> List[Finding]:
    return [finding for finding in findings if finding.question == question]


_NAMES = {
    "init": "initialisation", "scores": "attention scores", "readout": "readout multiplier", "values": "values at the start",
    "updates": "update sizes", "rates": "rates during the run", "decay": "weight decay", "branches": "branches over depth",
}  # fmt: skip


def _exact(question: str, findings: Sequence[Finding]) -> Optional[Verdict]:
    """Every slope is where it should be, give or take its tolerance; None for a model that has nothing of the kind."""
    findings = [finding for finding in findings if finding.slope is not None]
    if not findings:
        missing = question in ("updates", "init", "values")
        return Verdict(_NAMES[question], INCONCLUSIVE, None, None, "nothing could be measured") if missing else None
    worst = max(findings, key=lambda finding: abs(finding.excess) / finding.tolerance)
    wrong = sum(not finding.ok for finding in findings)
    axis = "depth" if question == "branches" else "width"
    text = f"`{worst.subject}` scales with power {signed(worst.slope or 0.0)} of the {axis}, {signed(worst.expected)} expected"
    if wrong > 1:
        text += f"; {wrong} of {len(findings)} are off"
    return Verdict(_NAMES[question], FAIL if wrong else PASS, abs(worst.excess), worst.tolerance, text)


def _unless_few(verdict: Optional[Verdict], figures: Figures) -> Optional[Verdict]:
    """The verdict on something that scatters; inconclusive where there are too few sizes for a trend."""
    if verdict is None or figures.few is None or not verdict.threshold:
        return verdict
    return replace(verdict, status=INCONCLUSIVE, text=f"{verdict.text}; {figures.few}")


def _changes(findings: Sequence[Finding], figures: Figures, control: Optional[Figures]) -> Verdict:
    name = "activation changes"
    if figures.diverged:
        size, _, step = figures.diverged[0]
        return Verdict(name, FAIL, None, GROWTH, f"the loss is not finite at {figures.axis} {size}, step {step}")
    rows = _of(findings, "changes")
    slopes = [row for row in rows if row.slope is not None]
    if not slopes:
        return Verdict(name, INCONCLUSIVE, None, GROWTH, "no activation changed at two widths")
    worst = max(slopes, key=lambda row: row.excess)
    text = f"`{worst.subject}` changes with power {signed(worst.slope or 0.0)} of the {figures.axis} at step {worst.step}"
    last = max(row.step for row in rows)
    still = [row.subject for row in rows if row.slope is None and row.step == last]
    low = min((row for row in slopes if row.step == last and row.kind != OUTPUT), key=lambda row: row.excess, default=worst)
    if worst.excess > SURE_GROWTH and figures.few is None:
        return Verdict(name, FAIL, worst.excess, GROWTH, text)
    if still:
        return Verdict(name, FAIL, worst.excess, GROWTH, f"`{still[0]}` does not change in training")
    if figures.few is not None:
        return Verdict(name, INCONCLUSIVE, worst.excess, GROWTH, f"{text}; {figures.few}")
    if worst.excess > GROWTH:
        return Verdict(name, INCONCLUSIVE, worst.excess, GROWTH, f"{text}: between {GROWTH} and {SURE_GROWTH}; more --seeds tell")
    if low.excess < SHRINKAGE:
        text = f"`{low.subject}` changes ever less with {figures.axis} (power {signed(low.slope or 0.0)} at step {low.step})"
        return Verdict(name, INCONCLUSIVE, low.excess, SHRINKAGE, text)
    contrast = None if control is None else growth(control)
    if contrast is not None and contrast <= GROWTH:
        text += f"; but so does the standard parametrisation ({signed(contrast)}): no contrast at these widths, steps and rate"
        return Verdict(name, INCONCLUSIVE, worst.excess, GROWTH, text)
    if contrast is not None:
        text += f" (standard parametrisation {signed(contrast)})"
    return Verdict(name, PASS, worst.excess, GROWTH, text)


def growth(figures: Figures) -> float:
    """The largest slope of a change among all modules and judged steps; infinite for a run that diverged."""
    if figures.diverged:
        return float("inf")
    slopes = [finding.slope for finding in _of(find(figures), "changes") if finding.slope is not None]
    return max(slopes, default=0.0)


# --- depth ---

BRANCHES = 0.3


def find_depth(figures: Figures) -> List[Finding]:
    """Slopes over depth of what CompleteP (Dey et al. 2025) promises: each branch adds 1/depth, so their sum changes as one."""
    found: List[Finding] = []
    for module, rows in grouped(figures.coordinates, lambda row: row.module).items():
        if {row.size for row in rows} != set(figures.sizes):
            continue  # a layer that the shallowest model has not
        by_step = grouped(rows, lambda row: str(row.step))
        if rows[0].role == BRANCH:
            found.append(Finding("branches", module, BRANCH, slope_of(by_step["0"], lambda row: row.rms), -1.0, BRANCHES))
        for step in judged_steps(figures.steps()) if rows[0].role == STREAM else []:
            value = slope_of(by_step.get(str(step), []), lambda row: row.change)
            found.append(Finding("depth", module, STREAM, value, 0.0, GROWTH, step, one_sided=True))
    return found


def judge_depth(figures: Figures, control: Optional[Figures] = None) -> List[Verdict]:
    """Verdicts of runs at several depths. `control`: without a rule for depth."""
    name = "changes over depth"
    if figures.diverged:
        size, _, step = figures.diverged[0]
        return [Verdict(name, FAIL, None, GROWTH, f"the loss is not finite at depth {size}, step {step}")]
    findings = find_depth(figures)
    branches = _exact("branches", _of(findings, "branches"))
    slopes = [finding for finding in _of(findings, "depth") if finding.slope is not None]
    if branches is None or not slopes:
        return [Verdict(name, INCONCLUSIVE, None, GROWTH, "the model has no branches whose sum could be followed")]
    worst = max(slopes, key=lambda finding: finding.excess)
    text = f"`{worst.subject}` changes with power {signed(worst.slope or 0.0)} of the depth at step {worst.step}"
    status = FAIL if worst.excess > SURE_GROWTH else INCONCLUSIVE if worst.excess > GROWTH else PASS
    if figures.few is not None:
        few = [_unless_few(each, figures) for each in (branches, Verdict(name, status, worst.excess, GROWTH, text))]
        return [each for each in few if each is not None]
    if control is not None:
        others = [finding.slope for finding in _of(find_depth(control), "depth") if finding.slope is not None]
        contrast = max(others, default=float("inf") if control.diverged else 0.0)
        text += f" (without a depth rule {signed(contrast)})"
        if status == PASS and contrast <= GROWTH:
            status, text = INCONCLUSIVE, f"{text}: no contrast at these depths"
    return [branches, Verdict(name, status, worst.excess, GROWTH, text)]
