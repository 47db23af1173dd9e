"""Levers: the verdict does not know their order, what they do does not depend on it, and each that is advised helps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from ipu_lean.ipu.plan import LEVERS, Workload, first_lever, levers_until_it_fits, make_plan
from ipu_lean.ipu.plan.levers import spread
from ipu_lean.ipu.plan.machine import FITS, TIGHT
from ipu_lean.ipu.plan.published import PUBLISHED, UNPUBLISHED, transformer

pytestmark = pytest.mark.pod
EVERY = [workload for workload, _ in PUBLISHED + UNPUBLISHED if workload.training]
LARGE = {workload.name: workload for workload in EVERY}["GPT2-XL training on 8"]
ORDER = [
    "smaller micro-batches", "recompute layer by layer", "less room for matrix products", "the loss in slices",
    "optimizer state off chip", "optimizer state shared by the replicas", "layers off the first IPUs", "more IPUs",
    "fp16 sums and moments", "shorter sequences",
]


def drawn(draw: random.Random) -> Workload:
    """A transformer of any size, run in any way."""
    width, depth, ipus = draw.choice([256, 768, 1600]), draw.choice([8, 12, 24]), draw.choice([2, 4, 8])
    network = replace(transformer(width, width // 64, depth, draw.choice([256, 1024, 2048]), 50272), block=draw.choice([1, 2]))
    layers = spread(replace(network, block=1, embedding=draw.choice([0, network.embedding])), ipus)
    assert layers is not None
    return Workload(
        "drawn", network, layers, micro=draw.choice([1, 2, 6, 8]), accumulation=64, replicas=draw.choice([1, 2, 4]),
        accumulator=draw.choice([2, 4]), moments=draw.choice([(2, 4), (4, 4), (4,), ()]), state_offchip=draw.random() < 0.5,
        every_layer=draw.random() < 0.5, proportions=draw.choice([(0.6,), (0.1, 0.3)]), logit_tokens=draw.choice([None, 64, 512]),
    )


def test_experts_try_them_in_this_order() -> None:
    assert [lever.name for lever in LEVERS] == ORDER


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_the_levers_changes_no_verdict(seed: int) -> None:
    """Neither that of a plan as it is, nor that of a plan after all levers were pulled."""
    draw = random.Random(seed)
    for workload in [*EVERY, *(drawn(draw) for _ in range(10))]:
        shuffled = draw.sample(LEVERS, len(LEVERS))
        before = make_plan(workload)
        levers_until_it_fits(before, shuffled)
        assert make_plan(workload) == before and make_plan(workload).verdict == before.verdict
        one, other = workload, workload
        for lever in LEVERS:
            one = lever.pull(one)
        for lever in shuffled:
            other = lever.pull(other)
        assert make_plan(one) == make_plan(other)
        assert (one.global_batch == workload.global_batch) == (one.replicas == workload.replicas)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_advised_helps_and_ends(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(40):
        plan = make_plan(drawn(draw))
        steps = levers_until_it_fits(plan)
        assert (plan.guilty is None) == (not steps and plan.verdict == "fits")
        worst = [max(max(row.shares[0] - FITS.before, row.shares[1] - FITS.after) for row in each.ipus)
                 for each in [plan, *(step.plan for step in steps)]]
        assert all(later < earlier for earlier, later in zip(worst, worst[1:]))
        if steps:
            assert first_lever(plan) == steps[0]
            assert (steps[-1].plan.guilty is None) or first_lever(steps[-1].plan) is None


def test_the_first_lever_is_the_first_that_was_not_pulled() -> None:
    wasteful = replace(LARGE, micro=4, proportions=(0.6,), every_layer=False)
    names = [step.lever for step in levers_until_it_fits(make_plan(wasteful))]
    assert names[:4] == [ORDER[0], ORDER[0], ORDER[1], ORDER[2]]
    step = first_lever(make_plan(wasteful))
    assert step is not None and step.keys == "batch.micro: 2, batch.accumulation: 16384"
    assert first_lever(make_plan(LARGE)).lever == "more IPUs"


def test_more_ipus_says_what_the_longer_pipeline_needs() -> None:
    step = first_lever(make_plan(replace(LARGE, accumulation=20)))
    layers = [0, *[3] * 12, *[4] * 3]
    assert step.keys == f"ipu.layers_per_ipu: {layers}, batch.replicas: 1, batch.accumulation: 33 or more"


def test_more_ipus_have_shares_of_their_own() -> None:
    """A list has one for each IPU; another length would not load."""
    (lever,) = [lever for lever in LEVERS if lever.name == "more IPUs"]
    changed = lever.pull(replace(LARGE, proportions=(0.3, *[0.2] * 7)))
    assert f"ipu.matmul_proportion: {[0.3, *[0.2] * 15]}" in lever.keys(changed)
    assert "matmul" not in lever.keys(lever.pull(LARGE))


def test_a_verdict_is_that_of_the_worst_ipu() -> None:
    plan = make_plan(LARGE)
    assert [row.verdict for row in plan.ipus][0] == "fits" and plan.verdict == "no"
    assert all((row.verdict == "no") == (row.shares[0] > TIGHT.before or row.shares[1] > TIGHT.after) for row in plan.ipus)


@pytest.mark.parametrize("depth, ipus, wanted", [(12, 1, (12,)), (12, 4, (0, 4, 4, 4)), (24, 8, (0, 3, 3, 3, 3, 4, 4, 4))])
def test_spread_as_the_published_recipes_do(depth: int, ipus: int, wanted: tuple) -> None:
    assert spread(transformer(64, 1, depth, 8, 10), ipus) == wanted


def test_layers_that_share_weights_are_not_moved() -> None:
    network = transformer(64, 1, 4, 8, 10)
    assert spread(replace(network, layers=(9, 0, 9, 0)), 2) is None
    assert spread(replace(network, embedding=0), 2) == (2, 2) and spread(network, 8) is None
