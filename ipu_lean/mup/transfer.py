"""Does the best learning rate hold while the model grows? From losses over a grid of (width or depth, learning rate, seed).

    optimum         vertex of the parabola through the three points (log2 lr, mean loss) around the lowest one
    its error       the spread between seeds, taken together over all sizes, carried through that vertex (first order)
    slope           least-squares line of the optima over log2(width): how far the optimum moves per doubling
    cost            relative rise of the largest model's loss when it is trained with the smallest one's best rate of the grid

Thresholds: muP was measured at slopes of -0.15 and +0.25, the standard parametrisation at -1 to -1.5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from ipu_lean.mup.verdict import FAIL, INCONCLUSIVE, PASS, Verdict, overall

SLOPE_PASS, SLOPE_FAIL = 0.25, 0.5
"""log2 of the learning rate per doubling: up to the first is transfer, from the second on it is none."""
COST = 0.01
"""Share of the loss that the small model's rate may cost the large one."""
SPAN = 2.0
"""Doublings between the smallest and the largest model, below which a slope says too little."""
TRANSFER, PRICE, BIGGER = "lr-transfer", "lr-cost", "bigger-is-better"
GATES = (TRANSFER, PRICE)
"""The verdicts that decide; the other one is reported."""


class Row(NamedTuple):
    """One trial: `size` is its width or depth, `loss` is infinite if it diverged. Other failures are left out."""

    size: float
    lr: float
    seed: int
    loss: float


@dataclass(frozen=True)
class Optimum:
    """The best learning rate at one size.

    `best_lr`, `loss`: of the grid, by mean loss over seeds (None, inf if nothing converged). `log2_lr`, `error`: the parabola's
    vertex and its standard error (None with one seed). `problem`: why there is no vertex. `means`: {lr: mean loss over
    `seeds` seeds}, ascending.
    """

    size: float
    best_lr: Optional[float]
    loss: float
    log2_lr: Optional[float]
    error: Optional[float]
    problem: Optional[str]
    means: Dict[float, float]
    seeds: int


@dataclass(frozen=True)
class Drift:
    """Slope of the optimum per doubling and its standard error (None with one seed); `noise`: of one loss, between seeds."""

    slope: Optional[float]
    error: Optional[float]
    noise: Optional[float]
    optima: Tuple[Optimum, ...]


class _Size(NamedTuple):
    """The losses at one size: learning rates ascending, seeds, and losses[lr][seed]."""

    size: float
    lrs: List[float]
    seeds: List[int]
    losses: List[List[float]]

    @property
    def means(self) -> List[float]:
        return [math.fsum(row) / len(row) for row in self.losses]

    @property
    def best(self) -> Optional[int]:
        """Index of the lowest mean, None if none is finite."""
        means = self.means
        finite = [index for index, value in enumerate(means) if math.isfinite(value)]
        return min(finite, key=lambda index: means[index]) if finite else None

    def window(self) -> Tuple[Optional[List[int]], Optional[str]]:
        """The three points around the minimum, or why there are none."""
        best, means = self.best, self.means
        if best is None:
            return None, "no learning rate converged"
        if best == 0:
            return None, "the lowest loss is at the lowest learning rate of the grid"
        if best == len(means) - 1:
            return None, "the lowest loss is at the highest learning rate of the grid"
        around = [best - 1, best, best + 1]
        if not all(math.isfinite(means[index]) for index in around):
            return None, "the learning rate next to the best one diverged"
        if means[best - 1] == means[best] == means[best + 1]:
            return None, "the losses around the minimum are all equal"
        return around, None


def vertex(xs: Sequence[float], ys: Sequence[float]) -> Tuple[float, List[float]]:
    """Where the parabola through three points with ascending x has its minimum, and that place's derivative by each y."""
    a, b = xs[1] - xs[0], xs[1] - xs[2]
    top = a * a * (ys[1] - ys[2]) - b * b * (ys[1] - ys[0])
    bottom = a * (ys[1] - ys[2]) - b * (ys[1] - ys[0])
    tops, bottoms = (b * b, a * a - b * b, -a * a), (b, a - b, -a)
    gradient = [-(one * bottom - top * other) / (2 * bottom * bottom) for one, other in zip(tops, bottoms)]
    return xs[1] - top / (2 * bottom), gradient


def drift(rows: Iterable[Row]) -> Drift:
    """Optima by size and the line through them."""
    sizes = _tabulate(rows)
    noise = _noise(sizes)
    optima = tuple(_optimum(size, noise) for size in sizes)
    if len(optima) < 2 or any(one.log2_lr is None for one in optima):
        return Drift(None, None, noise, optima)
    xs = [math.log2(one.size) for one in optima]
    mean = math.fsum(xs) / len(xs)
    spread = math.fsum((x - mean) ** 2 for x in xs)
    weights = [(x - mean) / spread for x in xs]
    slope = math.fsum(weight * one.log2_lr for weight, one in zip(weights, optima))
    error = None if noise is None else math.sqrt(math.fsum((w * one.error) ** 2 for w, one in zip(weights, optima)))
    return Drift(slope, error, noise, optima)


def judge_transfer(rows: Sequence[Row], axis: str = "width", control: Sequence[Row] = ()) -> List[Verdict]:
    """Three verdicts: does the optimum stay, what does the smallest model's rate cost the largest, is bigger better.

    Args:
        axis: the word for `Row.size`. control: the same sweep under the standard parametrisation; if its optimum stays as well,
            the sweep has no contrast and passes nothing.
    Returns:
        Nothing for fewer than two sizes.
    """
    found = drift(rows)
    if len(found.optima) < 2:
        return []
    return [_transfer(found, axis, drift(control) if control else None), _price(found, axis), _bigger(found, axis)]


def decide(verdicts: Iterable[Verdict]) -> Optional[str]:
    """What the verdicts that decide say together; None if there are none."""
    gates = [verdict for verdict in verdicts if verdict.name in GATES]
    return overall(gates) if gates else None


# -- the verdicts ------------------------------------------------------------------------------------------------------
def _transfer(found: Drift, axis: str, control: Optional[Drift]) -> Verdict:
    def verdict(status: str, text: str) -> Verdict:
        return Verdict(TRANSFER, status, found.slope, SLOPE_PASS, text)

    for one in found.optima:
        if one.problem is not None:
            return verdict(INCONCLUSIVE, f"at {axis} {one.size:g} {one.problem}: sweep more learning rates there")
    where = ", ".join(f"2^{one.log2_lr:.2f} at {one.size:g}" for one in found.optima)
    error = "" if found.error is None else f" ± {found.error:.2f}"
    text = f"the optimum moves by {found.slope:+.2f}{error} log2 per doubling of {axis} ({where})"
    slope, doubt = abs(found.slope), 2 * (found.error or 0.0)
    span = math.log2(found.optima[-1].size / found.optima[0].size)
    if span < SPAN - 1e-9:
        return verdict(INCONCLUSIVE, f"{text}, over {span:.1f} doublings, which are too few: sweep a {axis} 4 times the smallest")
    if slope >= SLOPE_FAIL and slope - doubt > SLOPE_PASS:
        return verdict(FAIL, f"{text}: the learning rate does not transfer")
    if found.error is None:
        return verdict(INCONCLUSIVE, f"{text}, but one seed says nothing about the noise: sweep 2 or more")
    if slope > SLOPE_PASS or slope + doubt >= SLOPE_FAIL:
        return verdict(INCONCLUSIVE, f"{text}: between {SLOPE_PASS} and {SLOPE_FAIL}, or perhaps so. Sweep more seeds")
    if control is not None and control.slope is not None and abs(control.slope) <= SLOPE_PASS:
        return verdict(
            INCONCLUSIVE,
            f"{text}, but so little does it move under the standard parametrisation too ({control.slope:+.2f}): no contrast",
        )
    return verdict(PASS, text)


def _price(found: Drift, axis: str) -> Verdict:
    small, large = found.optima[0], found.optima[-1]
    rate = small.best_lr
    if rate is None or large.best_lr is None or rate not in large.means:
        return Verdict(PRICE, INCONCLUSIVE, None, COST, f"there is no common learning rate to compare at {axis} {large.size:g}")
    cost = (large.means[rate] - large.loss) / abs(large.loss)
    doubt = 0.0 if found.noise is None else 2 * found.noise * math.sqrt(2 / large.seeds) / abs(large.loss)
    rate_text = f"the best rate of {axis} {small.size:g} (2^{math.log2(rate):.2f})"
    text = f"{rate_text} costs {axis} {large.size:g} {100 * cost:.2f} % of its best loss"
    if not math.isfinite(cost):
        return Verdict(PRICE, FAIL, None, COST, f"{rate_text} makes {axis} {large.size:g} diverge")
    if cost > COST:
        clear = cost - doubt > COST
        return Verdict(PRICE, FAIL if clear else INCONCLUSIVE, cost, COST, text if clear else f"{text}, within the noise of 1 %")
    edge = next((one for one in (small, large) if one.problem is not None), None)
    if edge is not None:
        return Verdict(PRICE, INCONCLUSIVE, cost, COST, f"{text}, but at {axis} {edge.size:g} {edge.problem}")
    return Verdict(PRICE, PASS, cost, COST, text)


def _bigger(found: Drift, axis: str) -> Verdict:
    losses = [one.loss for one in found.optima]
    if not all(math.isfinite(loss) for loss in losses):
        return Verdict(BIGGER, INCONCLUSIVE, None, 0.0, f"at some {axis} no learning rate converged")
    where = ", ".join(f"{one.loss:.4f} at {one.size:g}" for one in found.optima)
    rise = max(later - earlier for earlier, later in zip(losses, losses[1:]))
    text = f"best losses by {axis}: {where}"
    if rise < 0:
        return Verdict(BIGGER, PASS, rise, 0.0, text)
    doubt = math.inf if found.noise is None else 2 * found.noise * math.sqrt(2 / min(one.seeds for one in found.optima))
    clear = rise > doubt
    return Verdict(BIGGER, FAIL if clear else INCONCLUSIVE, rise, 0.0, text if clear else f"{text}, which is within the noise")


# -- the table behind them ---------------------------------------------------------------------------------------------
def _tabulate(rows: Iterable[Row]) -> List[_Size]:
    """Rows by size. Seeds that some learning rate of a size lacks are left out there, if any seed is complete."""
    found: Dict[float, Dict[float, Dict[int, float]]] = {}
    for row in rows:
        loss = row.loss if math.isfinite(row.loss) else math.inf
        found.setdefault(row.size, {}).setdefault(row.lr, {})[row.seed] = loss
    sizes = []
    for size in sorted(found):
        by_lr = found[size]
        lrs = sorted(by_lr)
        complete = set.intersection(*(set(by_lr[lr]) for lr in lrs))
        if not complete:  # keep the largest set of learning rates that share a seed
            seed = max(sorted({s for lr in lrs for s in by_lr[lr]}), key=lambda s: sum(s in by_lr[lr] for lr in lrs))
            lrs = [lr for lr in lrs if seed in by_lr[lr]]
            complete = set.intersection(*(set(by_lr[lr]) for lr in lrs))
        seeds = sorted(complete)
        sizes.append(_Size(size, lrs, seeds, [[by_lr[lr][seed] for seed in seeds] for lr in lrs]))
    return sizes


def _noise(sizes: Sequence[_Size]) -> Optional[float]:
    """Standard deviation of one loss between seeds, what a seed shifts at every learning rate alike taken out: it moves no
    minimum. From the three points around each minimum, all sizes together; None without a second seed.
    """
    squares, freedom = 0.0, 0
    for size in sizes:
        around, _ = size.window()
        if around is None or len(size.seeds) < 2:
            continue
        block = [size.losses[index] for index in around]
        by_seed = [math.fsum(row[s] for row in block) / 3 for s in range(len(size.seeds))]
        by_lr = [math.fsum(row) / len(row) for row in block]
        whole = math.fsum(by_lr) / 3
        squares += math.fsum(
            (block[i][s] - by_lr[i] - by_seed[s] + whole) ** 2 for i in range(3) for s in range(len(size.seeds))
        )
        freedom += 2 * (len(size.seeds) - 1)
    return math.sqrt(squares / freedom) if freedom else None


def _optimum(size: _Size, noise: Optional[float]) -> Optimum:
    means = dict(zip(size.lrs, size.means))
    best = size.best
    around, problem = size.window()
    seeds = len(size.seeds)
    best_lr, loss = (None, math.inf) if best is None else (size.lrs[best], size.means[best])
    if around is None:
        return Optimum(size.size, best_lr, loss, None, None, problem, means, seeds)
    place, gradient = vertex([math.log2(size.lrs[i]) for i in around], [size.means[i] for i in around])
    error = None if noise is None else noise / math.sqrt(seeds) * math.sqrt(math.fsum(g * g for g in gradient))
    return Optimum(size.size, best_lr, loss, place, error, None, means, seeds)
