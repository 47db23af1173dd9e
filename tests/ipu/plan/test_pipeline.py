"""Stages, stash depth and minimum accumulation: what the emulator traces, and PopART's schedule played through."""

from __future__ import annotations

import random
from typing import Dict, List, Tuple

import pytest
import torch

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.config.layout import layout, stages
from ipu_lean.ipu import PopTrainStep, make_options, place
from ipu_lean.ipu.emulator.examine import Report, examine
from ipu_lean.ipu.plan.memory import stage_memory
from ipu_lean.ipu.plan.network import workload_of
from ipu_lean.ipu.plan.pipeline import bubble, forward_stages, minimum_accumulation, route
from ipu_lean.models import build_meta
from tests.ipu.helpers import VOCAB
from tests.ipu.plan.placements import random_config

pytestmark = pytest.mark.pod


def traced(config, accumulation: int) -> Report:  # type: ignore[no-untyped-def]
    """What the emulator says of the configuration's step with that many micro-batches."""
    model = build_meta(config, VOCAB)
    placement = place(model, config, poptorch)
    options = make_options(config, poptorch).train
    options.Training.gradientAccumulation(accumulation)
    rows = config.batch.micro * accumulation
    inputs = tuple(torch.zeros(rows, config.model.seq, dtype=torch.int32, device="meta") for _ in range(2))
    report = examine(PopTrainStep(model, poptorch), inputs, options=options)
    placement.remove()
    return report


def visited(report: Report) -> List[int]:
    """IPUs of the traced operations in the order of their stages, from IPU 0 on."""
    path = [0]
    for _, ipu in sorted({(row["stage"], row["ipu"]) for row in report.ops if not row["constant"]}):
        if ipu != path[-1]:
            path.append(ipu)
    return path


@pytest.mark.parametrize("seed", range(10))
def test_ten_random_placements_are_those_of_the_emulator(seed: int) -> None:
    """Stages and their IPUs, layers in each; one micro-batch less than needed is refused, and no more."""
    draw = random.Random(seed)
    for number in range(10):
        config = random_config(draw)
        workload = workload_of(config)
        found, forward = route(workload), forward_stages(workload)
        assert [stage.ipu for stage in found] == layout(config).path and forward == stages(config)
        needed = minimum_accumulation(forward)
        short = traced(config, max(1, needed - 1))
        assert (short.forward_stages, short.ipus) == (len(found), workload.ipus)
        assert visited(short) == [stage.ipu for stage in found]
        refused = [violation for violation in short.violations if violation.rule == "pipeline"]
        assert len(refused) == (1 if forward > 1 else 0) and len(short.violations) == len(refused), short.violations
        assert not refused or str(needed) in refused[0].message
        if number < 2:
            assert traced(config, needed).violations == []


def alive(forward: int, accumulation: int) -> Dict[int, int]:
    """Most micro-batches that each forward stage keeps, from the schedule: at each step every stage, forward or backward, takes
    the next micro-batch; the last forward stage and the first backward one are a single stage.
    """
    most: Dict[int, int] = {}
    for stage in range(forward):
        made = [step + stage for step in range(accumulation)]
        read = [step + 2 * (forward - 1) - stage for step in range(accumulation)]
        times = range(read[-1] + 1)
        most[stage] = max(sum(first <= time <= last for first, last in zip(made, read)) for time in times)
    return most


def idle(forward: int, accumulation: int) -> float:
    """Share of the steps of an update in which a stage has nothing to do."""
    steps = accumulation + 2 * forward - 2
    return (steps - accumulation) / steps


@pytest.mark.parametrize("seed", range(10))
def test_stash_depths_are_those_of_the_schedule(seed: int) -> None:
    draw = random.Random(100 + seed)
    for _ in range(10):
        config = random_config(draw)
        workload = workload_of(config)
        found = route(workload)
        if forward_stages(workload) == 1:
            assert {stage.depth for stage in found} == {1}
            continue
        forward = len(found)
        needed = minimum_accumulation(forward)
        assert {stage.index: stage.depth for stage in found} == alive(forward, needed + 3)
        # 2F-1 is the least that fills every stage: the first stage then keeps as many micro-batches as there are.
        assert alive(forward, needed)[0] == needed > alive(forward, needed - 1)[0]
        assert bubble(forward, needed) == pytest.approx(idle(forward, needed))


def test_the_rules_in_numbers() -> None:
    """Tied GPT-2 on 4, 8 and 16 IPUs needs 9, 17 and 33 micro-batches."""
    assert [minimum_accumulation(ipus + 1) for ipus in (4, 8, 16)] == [9, 17, 33]
    assert bubble(5, 128) == pytest.approx(8 / 136)
    assert bubble(1, 7) == 0


def test_parts_stand_where_they_are_placed() -> None:
    config = random_config(random.Random(3))
    rows = stage_memory(workload_of(config))
    layers: List[Tuple[int, ...]] = [row.stage.layers for row in rows]
    assert [number for group in layers for number in group] == list(range(config.model.depth))
    assert sum(row.stage.embeds for row in rows) == sum(row.stage.heads for row in rows) == 1
