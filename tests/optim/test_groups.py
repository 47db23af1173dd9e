"""The groups' numbers against the closed forms of the parametrisation, and against gradients that are really computed."""
from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.mup import Role, base_shapes_from_width, compute_roles
from ipu_lean.optim import mu_groups, multipliers
from tests.mup.toy import Toy

pytestmark = pytest.mark.pod
SETTINGS = {"lr": 0.01, "weight_decay": 0.1}


def toy(width, base_width=16, depth=2, depth_mult=1.0, ffn=None):
    base = base_shapes_from_width(lambda w: Toy(w, base_width, depth), base_width)
    model = Toy(width, base_width, depth, ffn, branch=depth_mult)
    inside = {name for name in base if name.startswith("blocks.")}
    model.roles = compute_roles(model, base, depth_scaled=inside, depth_mult=depth_mult)
    return model


def by_name(model, **options):
    groups = mu_groups(model.named_parameters(), model.roles, **{**SETTINGS, **options})
    owner = {id(parameter): group for group in groups for parameter in group["params"]}
    return {name: owner[id(parameter)] for name, parameter in model.named_parameters()}


def test_adam_table():
    """Width 64 over 16, FFN 96 over 32, branches times 1/4."""
    got = by_name(toy(64, ffn=96, depth_mult=0.25), family="adam", eps=1e-8, decay_vectors=False)
    want = {
        "embedding.weight": (0.01, 0.1, 1e-8 / 4),
        "position": (0.01, 0.1, 1e-8 / 4),
        "features.weight": (0.01, 0.1, 1e-8 / 4),
        "features.bias": (0.01, 0.0, 1e-8 / 4),
        "blocks.0.norm.weight": (0.01, 0.0, 1e-8 / 4 / 4),
        "blocks.0.up.weight": (0.01 / 4, 0.1 * 4, 1e-8 / 3 / 4),
        "blocks.0.up.bias": (0.01, 0.0, 1e-8 / 3 / 4),
        "blocks.0.down.weight": (0.01 / 3, 0.1 * 3, 1e-8 / 4 / 4),
        "norm.bias": (0.01, 0.0, 1e-8 / 4),
        "head.weight": (0.01, 0.1, 1e-8 / 4),
        "head.bias": (0.01, 0.0, 1e-8),
    }
    for name, values in want.items():
        assert [got[name][key] for key in ("lr", "weight_decay", "eps")] == pytest.approx(values, rel=1e-12), name


def test_sgd_table():
    got = by_name(toy(64, ffn=96, depth_mult=0.5), family="sgd", decay_vectors=True)
    want = {
        "embedding.weight": 4, "features.weight": 4, "features.bias": 4, "head.weight": 4, "head.bias": 1, "norm.weight": 4,
        "blocks.0.up.weight": 3 / 4 / 0.5, "blocks.0.down.weight": 4 / 3 / 0.5, "blocks.0.up.bias": 3 / 0.5,
    }  # fmt: skip
    for name, factor in want.items():
        assert got[name]["lr"] == pytest.approx(0.01 * factor), name
        assert got[name]["weight_decay"] == pytest.approx(0.1 / factor), name
        assert "eps" not in got[name]


@pytest.mark.parametrize("family", ["adam", "sgd"])
def test_decay_per_step_by_rule(family):
    """Share of a weight that decay takes off in one step at peak lr: lr x decay coupled, decay itself independent of all."""
    for width in (8, 16, 64):
        model = toy(width)
        for name, group in by_name(model, family=family, decay="coupled").items():
            if model.roles[name].kind != "vector":
                assert group["lr"] * group["weight_decay"] == pytest.approx(0.01 * 0.1)
        for group in by_name(model, family=family, decay="independent", weight_decay=1e-4, decay_vectors=True).values():
            assert group["lr"] * group["weight_decay"] == pytest.approx(1e-4)
        for group in by_name(model, family=family, decay="unscaled", decay_vectors=True).values():
            assert group["weight_decay"] == 0.1


def test_independent_decay_that_cannot_be_meant():
    with pytest.raises(ConfigError, match="0.001 decays the base model as coupled decay of 0.1 does"):
        by_name(toy(32), family="adam", decay="independent")


def test_one_group_per_kind_and_multiplier_in_order():
    model = toy(64, ffn=96)
    groups = mu_groups(model.named_parameters(), model.roles, family="adam", eps=1e-8, decay_vectors=False, **SETTINGS)
    # position and embedding; norms and biases of the width; FFN up; its bias; FFN down; and so on, each where it first appears.
    assert " ".join(group["kind"] for group in groups) == "embedding input vector hidden vector hidden readout vector"
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
    assert groups[3]["initial_lr"] == groups[3]["lr"] == 0.01 / 4 and groups[3]["lr_mult"] == 0.25


def test_tied_parameter_once_under_the_name_with_a_role():
    parameter = nn.Parameter(torch.zeros(2, 2))
    groups = mu_groups([("alias", parameter), ("real", parameter)], {"real": Role("hidden", 2.0, 2.0)}, family="adam", **SETTINGS)
    assert len(groups) == 1 and groups[0]["params"] == [parameter] and groups[0]["lr"] == 0.005


def test_refusals():
    parameter = nn.Parameter(torch.zeros(2, 3))
    with pytest.raises(ConfigError, match=r"`a.b` of shape \(2, 3\) has no role"):
        mu_groups([("a.b", parameter)], {}, family="adam", **SETTINGS)
    with pytest.raises(ConfigError, match="no parameters"):
        mu_groups([], {}, family="adam", **SETTINGS)
    with pytest.raises(ConfigError, match="family"):
        mu_groups([("a", parameter)], {"a": Role("hidden", 1, 1)}, family="muon", **SETTINGS)
    with pytest.raises(ConfigError, match="lr is a tensor"):
        mu_groups([("a", parameter)], {"a": Role("hidden", 1, 1)}, family="adam", lr=torch.tensor(0.1), weight_decay=0.0)
    for bad in (-1.0, math.nan, math.inf, "0.1", True, None):
        with pytest.raises(ConfigError, match="finite number"):
            mu_groups([("a", parameter)], {"a": Role("hidden", 1, 1)}, family="adam", lr=bad, weight_decay=0.0)


def gradient_sizes(width, ffn=None, depth=2, depth_mult=1.0, steps=4):
    """Root mean square of every gradient after some muP steps of Adam from a zero readout, eps too small to matter."""
    torch.manual_seed(0)
    model = toy(width, depth=depth, depth_mult=depth_mult, ffn=ffn)
    for name, parameter in model.named_parameters():
        if model.roles[name].kind == "hidden":
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    groups = mu_groups(model.named_parameters(), model.roles, family="adam", lr=0.01, weight_decay=0.0, eps=1e-20)
    optimizer = torch.optim.Adam(groups, lr=0.01)
    tokens, labels = torch.arange(10), torch.tensor([0, 1, 2, 3, 4, 0, 0, 0, 1, 1])
    for step in range(steps + 1):
        model.zero_grad()
        nn.functional.cross_entropy(model(tokens), labels).backward()
        if step < steps:
            optimizer.step()
    return model.roles, {n: p.grad.pow(2).mean().sqrt().item() for n, p in model.named_parameters() if p.grad.abs().sum() > 0}


def test_eps_follows_the_gradients_over_width():
    """Gradients shrink with width as the eps rule says: slope of log gradient over log width within 0.2 of that of eps."""
    (small, a), (large, b) = gradient_sizes(64), gradient_sizes(512)
    for name in a:
        slope = math.log(b[name] / a[name]) / math.log(8)
        rule = math.log(multipliers(large[name], "adam").eps / multipliers(small[name], "adam").eps) / math.log(8)
        assert abs(slope - rule) < 0.2, (name, slope, rule)


def test_eps_of_a_wider_ffn_alone():
    """Only the FFN grows: gradients of the matrix out of it stay, those of the matrix into it shrink."""
    (small, a), (large, b) = gradient_sizes(64, ffn=64), gradient_sizes(64, ffn=512)
    for name, rule in (("blocks.0.down.weight", 0.0), ("blocks.0.up.weight", -1.0)):
        factor = multipliers(large[name], "adam").eps / multipliers(small[name], "adam").eps
        assert math.log(factor) / math.log(8) == pytest.approx(rule)
        slope = math.log(b[name] / a[name]) / math.log(8)
        assert slope == pytest.approx(0.0, abs=0.2) if rule == 0 else -1.2 < slope < -0.4


def test_eps_and_sgd_follow_the_gradients_over_depth():
    """Inside branches multiplied by d, gradients are d times smaller: Adam's eps shrinks by d, SGD's lr grows by 1/d."""
    (small, a), (large, b) = gradient_sizes(64, depth=2, depth_mult=1.0), gradient_sizes(64, depth=16, depth_mult=2 / 16)
    for name in ("blocks.0.up.weight", "blocks.0.down.weight", "blocks.1.up.bias", "blocks.1.norm.weight", "embedding.weight"):
        ratio, rule = b[name] / a[name], multipliers(large[name], "adam").eps / multipliers(small[name], "adam").eps
        assert 0.6 < ratio / rule < 1.6, (name, ratio, rule)
        assert multipliers(large[name], "sgd").lr / multipliers(small[name], "sgd").lr == pytest.approx(1 / rule)
