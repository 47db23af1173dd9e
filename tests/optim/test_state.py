"""Loading an optimizer's state brings moments back and leaves every group's settings as built."""
from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.mup import base_shapes_from_width, compute_roles
from ipu_lean.optim import MuAdamW, MuSGD, apply_schedule, group_settings, load_state, restore_groups, settings_by_name
from tests.mup.toy import Toy

pytestmark = pytest.mark.pod
BASE = base_shapes_from_width(Toy, 16)


def build(width=64, **options):
    torch.manual_seed(0)
    model = Toy(width)
    model.roles = compute_roles(model, BASE)
    return model, MuAdamW(model, **{"lr": 0.01, "weight_decay": 0.1, **options})


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(torch.arange(10)), torch.arange(10) % 5).backward()
        optimizer.step()


def test_training_goes_on_exactly():
    one, optimizer_one = build()
    train(one, optimizer_one, 3)
    two, optimizer_two = build()
    two.load_state_dict(one.state_dict())
    load_state(optimizer_two, copy.deepcopy(optimizer_one.state_dict()))
    train(one, optimizer_one, 3)
    train(two, optimizer_two, 3)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))


def test_settings_are_the_fresh_ones():
    """Saved in mid-schedule with one lr, loaded with another: torch's own load takes the saved rates, ours does not."""
    model, optimizer = build(lr=0.01)
    train(model, optimizer, 1)
    apply_schedule(optimizer, 0.3)
    saved = optimizer.state_dict()
    other_model, other = build(lr=0.5, weight_decay=0.2)
    before = group_settings(other)
    load_state(other, saved)
    assert group_settings(other) == before
    assert torch.equal(other.state[other_model.head.weight]["exp_avg"], optimizer.state[model.head.weight]["exp_avg"])
    other.load_state_dict(saved)
    assert group_settings(other) != before
    restore_groups(other, before)
    assert group_settings(other) == before
    restore_groups(other, build(lr=0.5, weight_decay=0.2)[1].param_groups)
    assert group_settings(other) == before and other.param_groups[0]["params"][0] is next(iter(other_model.parameters()))
    assert saved["param_groups"][0]["lr"] == pytest.approx(0.003)


def test_another_width_is_refused():
    model, optimizer = build(32)
    train(model, optimizer, 1)
    with pytest.raises(ConfigError, match=r"exp_avg of shape \(3, 32\) for a parameter of shape \(3, 64\)"):
        load_state(build(64)[1], optimizer.state_dict())


def test_another_layout_is_refused():
    model, optimizer = build()
    with pytest.raises(ConfigError, match="another kind of optimizer"):
        load_state(MuSGD(model, lr=0.1), optimizer.state_dict())
    with pytest.raises(ConfigError, match="groups of"):
        load_state(MuAdamW(list(model.named_parameters())[1:], roles=model.roles, lr=0.1), optimizer.state_dict())
    with pytest.raises(ConfigError, match="groups of"):
        restore_groups(optimizer, group_settings(optimizer)[:-1])


def test_other_keys_pass_through():
    class Device(torch.optim.AdamW):
        """As PopTorch's: its state has keys of its own, and a state without them is refused."""

        def load_state_dict(self, state):
            self.device_state = state["ipu_state"]
            super().load_state_dict({key: state[key] for key in ("state", "param_groups")})

    model, optimizer = build(impl=Device)
    train(model, optimizer, 1)
    load_state(optimizer, {**optimizer.state_dict(), "ipu_state": 7})
    assert optimizer.device_state == 7


def test_settings_by_name():
    model, optimizer = build()
    optimizer.param_groups[-1]["params"].clear()
    got = settings_by_name(model.named_parameters(), optimizer)
    assert "head.bias" not in got and got["blocks.1.down.weight"]["lr"] == 0.0025 and "params" not in got["norm.weight"]
