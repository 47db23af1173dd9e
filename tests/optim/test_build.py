"""The optimizer and the schedule of a configuration."""
from __future__ import annotations

import functools

import pytest
import torch

from ipu_lean.config import load_config
from ipu_lean.errors import ConfigError
from ipu_lean.mup import base_shapes_from_width, compute_roles, format_table
from ipu_lean.optim import build_optimizer, build_schedule, explain_model, settings_by_name
from tests.mup.toy import Toy

pytestmark = pytest.mark.pod
BASE = base_shapes_from_width(Toy, 16)


def config(*overrides):
    return load_config("mup: {base_width: 64}\n", overrides)


def toy(width=64, device="cpu"):
    with torch.device(device):
        model = Toy(width, branch=0.5)
    model.base_shapes = BASE
    model.roles = compute_roles(model, BASE, depth_scaled={n for n in BASE if n.startswith("blocks.")}, depth_mult=0.5)
    return model


def settings(model, *overrides, **options):
    return settings_by_name(model.named_parameters(), build_optimizer(model, config(*overrides), **options))


def test_adamw_by_default():
    model = toy()
    optimizer = build_optimizer(model, config("optimizer.lr=0.01", "optimizer.eps=1e-6", "optimizer.weight_decay=0.2"))
    assert type(optimizer) is torch.optim.AdamW
    got = settings_by_name(model.named_parameters(), optimizer)
    hidden, norm = got["blocks.0.up.weight"], got["norm.weight"]
    assert (hidden["lr"], hidden["weight_decay"], hidden["eps"]) == pytest.approx((0.0025, 0.8, 1.25e-7))
    assert (norm["lr"], norm["weight_decay"], norm["eps"]) == pytest.approx((0.01, 0.0, 2.5e-7))
    assert hidden["betas"] == (0.9, 0.95)
    assert settings(model, "optimizer.decay_vectors=true")["norm.weight"]["weight_decay"] == 0.1


def test_standard_has_every_multiplier_of_width_at_one():
    for kind in ("adamw", "sgd"):
        standard = ("mup.parametrization=standard", "mup.base_width=null")
        got = settings(toy(), *standard, f"optimizer.kind={kind}", "optimizer.lr=0.01")
        inside = 2.0 if kind == "sgd" else 1.0  # the toy's branches are halved, and its roles say so
        for name, group in got.items():
            assert group["lr"] == pytest.approx(0.01 * (inside if name.startswith("blocks") else 1.0)), name
            assert group["weight_decay"] * group["lr"] == pytest.approx(0.0 if group["kind"] == "vector" else 0.001)


def test_sgd():
    model = toy()
    chosen = [f"optimizer.{item}" for item in ("kind=sgd", "momentum=0.9", "nesterov=true", "lr=0.1")]
    optimizer = build_optimizer(model, config(*chosen))
    group = settings_by_name(model.named_parameters(), optimizer)["embedding.weight"]
    assert type(optimizer) is torch.optim.SGD
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.4, 0.9, True)


def test_independent_decay():
    got = settings(toy(), "mup.decay=independent", "optimizer.weight_decay=1e-4", "optimizer.lr=0.01")
    for group in got.values():
        assert group["weight_decay"] * group["lr"] == pytest.approx(0.0 if group["kind"] == "vector" else 1e-4)
    with pytest.raises(ConfigError, match="independent") as caught:
        settings(toy(), "mup.decay=independent", "optimizer.kind=adam", "optimizer.weight_decay=1e-4")
    assert caught.value.key == "mup.decay"


def test_a_given_implementation_gets_every_setting():
    seen = {}

    def impl(groups, **options):
        seen.update(options)
        options.pop("loss_scaling")
        return torch.optim.AdamW(groups, **options)

    build_optimizer(toy(), config(), impl=functools.partial(impl, loss_scaling=8.0), foreach=True)
    assert seen == {"lr": 3e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "loss_scaling": 8.0, "foreach": True}


def test_a_model_without_roles():
    with pytest.raises(ConfigError, match="no `roles`"):
        build_optimizer(Toy(16), config())


def test_schedule():
    train = ("train.steps=50", "train.eval_every=50", "train.save_every=50")
    schedule = build_schedule(config("schedule.kind=linear", "schedule.warmup=10", "schedule.final=0.2", *train))
    assert (schedule.kind, schedule.warmup, schedule.steps, schedule.final) == ("linear", 10, 50, 0.2)
    assert build_schedule(config("schedule.steps=70")).steps == 70


def test_explain_shows_what_the_optimizer_holds():
    rows = explain_model(toy(device="meta"), config("optimizer.lr=0.01"))
    got = settings(toy(), "optimizer.lr=0.01")
    assert [row["name"] for row in rows] == [name for name, _ in Toy(64).named_parameters()]
    for row in rows:
        assert (row["lr"], row["decay"], row["eps"]) == tuple(got[row["name"]][key] for key in ("lr", "weight_decay", "eps"))
    assert "blocks.1.down.weight" in format_table(rows)
