"""The transfer verdict against surfaces whose optimum is known in closed form, and against simulated noise."""

from __future__ import annotations

import math
import random
import statistics

import numpy as np
import pytest

from ipu_lean.mup.transfer import BIGGER, PRICE, TRANSFER, Row, decide, drift, judge_transfer, vertex
from ipu_lean.mup.verdict import slope as slope_of_widths

pytestmark = pytest.mark.pod
GRID = [2.0**power for power in range(-12, -3)]
WIDTHS = (32, 64, 128, 256)


def surface(slope, widths=WIDTHS, seeds=2, noise=0.0, curve=0.02, at=-8.3, draw=None, better=0.05, grid=GRID):
    """loss = floor(width) + curve (log2 lr - optimum(width))^2 + a shift of each seed + noise."""
    draw = draw or random.Random(0)
    rows = []
    for width in widths:
        optimum = at + slope * math.log2(width / widths[0])
        for seed in range(seeds):
            shift = 0.3 * seed
            for lr in grid:
                loss = 3.3 - better * math.log2(width) + curve * (math.log2(lr) - optimum) ** 2 + shift
                rows.append(Row(width, lr, seed, loss + noise * draw.gauss(0, 1)))
    return rows


def by_name(verdicts):
    return {verdict.name: verdict for verdict in verdicts}


def test_the_vertex_of_three_points_is_numpys():
    draw = random.Random(1)
    for _ in range(50):
        xs = sorted(draw.uniform(-12, -2) for _ in range(3))
        a, x0, c = draw.uniform(0.01, 3), draw.uniform(-12, -2), draw.uniform(-2, 5)
        ys = [a * (x - x0) ** 2 + c for x in xs]
        if min(xs[1] - xs[0], xs[2] - xs[1]) < 0.1:
            continue
        place, gradient = vertex(xs, ys)
        assert place == pytest.approx(x0, abs=1e-6)
        top, middle, _ = np.polyfit(xs, ys, 2)
        assert place == pytest.approx(-middle / (2 * top), abs=1e-6)
        for index in range(3):  # central differences
            up, down = ([y + (h if i == index else 0) for i, y in enumerate(ys)] for h in (1e-6, -1e-6))
            assert gradient[index] == pytest.approx((vertex(xs, up)[0] - vertex(xs, down)[0]) / 2e-6, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("slope", [0.0, -0.15, 0.2, -1.0, -1.5])
def test_a_parabolic_surface_gives_its_own_slope(slope):
    found = drift(surface(slope, at=-6.0 if slope < -0.5 else -8.3, grid=[2.0**power for power in range(-14, -3)]))
    assert found.slope == pytest.approx(slope, abs=1e-9)
    assert found.noise == pytest.approx(0.0, abs=1e-9)
    assert [one.log2_lr for one in found.optima] == pytest.approx(
        [(-6.0 if slope < -0.5 else -8.3) + slope * k for k in range(4)]
    )


def test_the_slope_is_the_one_of_the_other_checks():
    found = drift(surface(-0.15))
    assert found.slope == pytest.approx(slope_of_widths(WIDTHS, [2**one.log2_lr for one in found.optima]))


def test_the_stated_error_is_the_spread_of_repeated_sweeps():
    draw = random.Random(7)
    found = [drift(surface(0.1, seeds=3, noise=0.003, draw=draw)) for _ in range(300)]
    slopes = [one.slope for one in found]
    assert statistics.mean(slopes) == pytest.approx(0.1, abs=0.02)
    stated = math.sqrt(statistics.mean(one.error**2 for one in found))
    assert stated == pytest.approx(statistics.stdev(slopes), rel=0.2)
    assert statistics.mean(one.noise for one in found) == pytest.approx(0.003, rel=0.15)


def test_no_sweep_without_transfer_passes_whatever_the_noise():
    draw = random.Random(3)
    for noise in (0.0, 0.003, 0.01, 0.03):
        for _ in range(60):
            wide = [2.0**power for power in range(-15, -2)]
            verdicts = judge_transfer(surface(-1.0, noise=noise, at=-5.3, draw=draw, grid=wide))
            assert by_name(verdicts)[TRANSFER].status != "pass" and decide(verdicts) != "pass"


@pytest.mark.parametrize(
    "slope, status", [(0.0, "pass"), (-0.2, "pass"), (-0.35, "inconclusive"), (0.55, "fail"), (-1.0, "fail")]
)
def test_thresholds(slope, status):
    wide = [2.0**power for power in range(-14, -2)]
    verdict = by_name(judge_transfer(surface(slope, at=-7.3, grid=wide, noise=1e-5)))[TRANSFER]
    assert verdict.status == status and verdict.number == pytest.approx(slope, abs=0.01)


@pytest.mark.parametrize(
    "rows, words",
    [
        (surface(0.0, at=-12.4), "lowest learning rate"),
        (surface(0.0, at=-3.8), "highest learning rate"),
        (surface(0.0, widths=(64, 96, 128)), "too few"),
        (surface(0.0, seeds=1), "one seed"),
        (surface(0.0, curve=0.0), "lowest learning rate of the grid"),
        (surface(0.0, noise=0.02), "more seeds"),
        ([row._replace(loss=math.inf if row.lr > 2**-8 else row.loss) for row in surface(0.0)], "highest|diverged"),
        ([row._replace(loss=math.nan) for row in surface(0.0)], "no learning rate converged"),
    ],
    ids=["low edge", "high edge", "narrow range", "one seed", "flat", "noise", "diverged beside it", "nothing converged"],
)
def test_too_little_to_tell_is_inconclusive_and_never_a_pass(rows, words):
    import re

    verdicts = judge_transfer(rows)
    verdict = by_name(verdicts)[TRANSFER]
    assert verdict.status == "inconclusive" and re.search(words, verdict.text), verdict
    assert decide(verdicts) != "pass"


def test_one_seed_is_enough_to_fail():
    assert by_name(judge_transfer(surface(-1.0, seeds=1, at=-5.3)))[TRANSFER].status == "fail"


def test_a_neighbour_that_diverged_leaves_no_parabola():
    rows = [row._replace(loss=math.inf) if row.lr == 2**-7 and row.seed == 1 and row.size == 64 else row for row in surface(0.0)]
    found = drift(rows)
    assert found.slope is None and "next to the best one diverged" in found.optima[1].problem


def test_the_control_must_move():
    rows = surface(0.0, noise=1e-5)
    still, moving = surface(0.05, noise=1e-5), surface(-1.0, at=-5.3, noise=1e-5)
    assert by_name(judge_transfer(rows, control=moving))[TRANSFER].status == "pass"
    verdict = by_name(judge_transfer(rows, control=still))[TRANSFER]
    assert verdict.status == "inconclusive" and "no contrast" in verdict.text


def test_the_cost_is_measured_at_the_rates_of_the_grid():
    rows = surface(-0.5, at=-6.0, noise=1e-6)
    verdict = by_name(judge_transfer(rows))[PRICE]
    assert verdict.status == "fail"
    # narrowest: optimum 2^-6; widest: between 2^-7 and 2^-8, at exactly -7.5: 2.25 against 0.25 of the curve
    best = 3.3 - 0.05 * 8 + 0.02 * 0.25 + 0.15
    assert verdict.number == pytest.approx(0.02 * (2.25 - 0.25) / best, rel=1e-3)
    assert by_name(judge_transfer(surface(-0.1, noise=1e-5)))[PRICE].status == "pass"


def test_a_rate_that_makes_the_large_model_diverge_fails():
    rows = [row._replace(loss=math.inf) if row.size == 256 and row.lr >= 2**-8 else row for row in surface(0.0)]
    verdict = by_name(judge_transfer(rows))[PRICE]
    assert verdict.status == "fail" and "diverge" in verdict.text and verdict.as_dict()["number"] is None


@pytest.mark.parametrize("better, status", [(0.05, "pass"), (-0.05, "fail"), (-1e-5, "inconclusive")])
def test_bigger_is_better_is_reported_and_decides_nothing(better, status):
    verdicts = judge_transfer(surface(0.0, noise=1e-4, better=better))
    assert by_name(verdicts)[BIGGER].status == status
    assert decide(verdicts) == "pass"


def test_seeds_that_some_rate_lacks_do_not_shift_the_mean():
    rows = surface(0.0, seeds=2)
    short = [row for row in rows if not (row.seed == 1 and row.lr == 2**-8)]  # seed 1 lies 0.3 higher everywhere
    assert drift(short).optima[0].log2_lr == pytest.approx(-8.3)


def test_one_size_is_nothing_to_judge():
    assert judge_transfer(surface(0.0, widths=(64,))) == [] and decide([]) is None
    assert judge_transfer([]) == []


def test_the_axis_has_its_name():
    assert "per doubling of depth" in by_name(judge_transfer(surface(0.0, noise=1e-5), axis="depth"))[TRANSFER].text
