"""Schedules in closed form, relative in every group, and stepped as an IPU call steps."""
from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.mup import Role
from ipu_lean.optim import Schedule, apply_schedule, mu_groups

pytestmark = pytest.mark.pod


def test_warm_up_reaches_one_when_it_ends():
    for kind in ("constant", "linear", "cosine"):
        schedule = Schedule(kind, warmup=4, steps=20, final=0.1)
        assert [schedule.multiplier(u) for u in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_linear_and_cosine_after_the_warm_up():
    linear, cosine = Schedule("linear", 4, 24, 0.1), Schedule("cosine", 4, 24, 0.1)
    assert [linear.multiplier(u) for u in (4, 9, 14, 19, 24, 100)] == pytest.approx([1, 0.775, 0.55, 0.325, 0.1, 0.1])
    half = math.sqrt(0.5)
    want = [1, 0.1 + 0.45 * (1 + half), 0.55, 0.1 + 0.45 * (1 - half), 0.1, 0.1]
    assert [cosine.multiplier(u) for u in (4, 9, 14, 19, 24, 100)] == pytest.approx(want)
    assert [Schedule("constant", 0, None).multiplier(u) for u in (0, 5, 10**6)] == [1.0] * 3
    assert Schedule("linear", 0, 10, 0.0).multiplier(10) == 0.0


def test_cosine_is_torchs():
    """CosineAnnealingLR with a floor of final x lr, for a single group, is the same curve."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=30, eta_min=0.2)
    schedule = Schedule("cosine", 0, 30, 0.1)
    for update in range(31):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(2.0 * schedule.multiplier(update), rel=1e-9)
        optimizer.step()
        scheduler.step()


def test_one_rate_per_device_call():
    schedule = Schedule("linear", 2, 40, 0.0)
    for size in (1, 3, 8):
        got = [schedule.lr_at(u, size) for u in range(24)]
        assert got == [schedule.multiplier(size * (u // size)) for u in range(24)]
        assert len(set(got)) == math.ceil(24 / size)


def test_groups_keep_their_ratios_and_forget_nothing():
    roles = {"a": Role("hidden", 4.0, 4.0), "b": Role("embedding", 1.0, 4.0)}
    named = [(name, nn.Parameter(torch.zeros(2, 2))) for name in roles]
    optimizer = torch.optim.AdamW(mu_groups(named, roles, family="adam", lr=0.8, weight_decay=0.1), lr=0.8)
    schedule = Schedule("cosine", 3, 10, 0.0)
    for update in (0, 5, 9, 10, 3, 3):
        apply_schedule(optimizer, schedule.multiplier(update))
        factor = schedule.multiplier(update)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.2 * factor, 0.8 * factor], abs=1e-15)


@pytest.mark.parametrize("arguments, key", [
    ({"kind": "step"}, "schedule.kind"),
    ({"kind": "cosine"}, "schedule.steps"),
    ({"kind": "linear", "warmup": 10, "steps": 10}, "schedule.warmup"),
    ({"warmup": -1}, "schedule.warmup"),
    ({"kind": "cosine", "steps": 10, "final": 1.5}, "schedule.final"),
    ({"kind": "cosine", "steps": 10, "final": -0.1}, "schedule.final"),
    ({"final": math.nan}, "schedule.final"),
])  # fmt: skip
def test_refusals(arguments, key):
    with pytest.raises(ConfigError) as caught:
        Schedule(**arguments)
    assert caught.value.key == key


def test_absolute_floor_and_foreign_groups():
    with pytest.raises(TypeError, match="min_lr"):
        Schedule("cosine", 0, 10, min_lr=1e-5)
    with pytest.raises(ConfigError, match="initial_lr"):
        apply_schedule(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 0.5)
