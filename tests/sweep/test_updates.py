"""Stacked updates beside torch's own optimizers, model by model."""

from __future__ import annotations

import copy

import pytest
import torch

from ipu_lean import _compat
from ipu_lean.sweep import updates
from ipu_lean.sweep.updates import FusedAdam, StackedUpdate, make_update

pytestmark = pytest.mark.pod

SHAPES = {"matrix": (5, 4), "vector": (4,), "table": (7, 3)}
FUSED = pytest.param(FusedAdam, marks=pytest.mark.skipif(_compat.fused_adam(True) is None, reason="torch has no such kernel"))
ADAM = [
    {"initial_lr": 0.01, "weight_decay": 0.1, "eps": 1e-8, "betas": (0.9, 0.95)},
    {"initial_lr": 0.3, "weight_decay": 0.0, "eps": 1e-4, "betas": (0.8, 0.999)},
    {"initial_lr": 1e-4, "weight_decay": 3.0, "eps": 1e-12, "betas": (0.0, 0.5)},
]
SGD = [
    {"initial_lr": 0.01, "weight_decay": 0.1, "momentum": 0.9, "nesterov": False},
    {"initial_lr": 0.3, "weight_decay": 0.0, "momentum": 0.5, "nesterov": True},
    {"initial_lr": 0.1, "weight_decay": 0.2, "momentum": 0.0, "nesterov": False},
]
TORCH = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def models_of(own):
    """Stacked weights, settings of each model (matrices learn more slowly), and torch's optimizers over the same numbers."""
    generator = torch.Generator().manual_seed(3)
    weights = {name: torch.randn((len(own), *shape), generator=generator) for name, shape in SHAPES.items()}
    settings = [
        {name: {**one, "initial_lr": one["initial_lr"] * (0.5 if name == "matrix" else 1.0)} for name in SHAPES} for one in own
    ]
    return weights, settings, generator


def reference(kind, weights, settings):
    optimizers = []
    for row, model in enumerate(settings):
        groups = []
        for name, stack in weights.items():
            values = {key: value for key, value in model[name].items() if key != "initial_lr"}
            groups.append({"params": [stack[row].clone().requires_grad_()], "lr": model[name]["initial_lr"], **values})
        optimizers.append(TORCH[kind](copy.copy(groups), lr=0.1))
    return optimizers


@pytest.mark.parametrize("kind, own", [("adamw", ADAM), ("adam", ADAM), ("sgd", SGD)])
@pytest.mark.parametrize("cls", [StackedUpdate, FUSED])
def test_each_model_moves_as_with_torchs_optimizer(cls, kind, own):
    if cls is FusedAdam and kind == "sgd":
        return
    weights, settings, generator = models_of(own)
    optimizers = reference(kind, weights, settings)
    update = cls(kind, weights, settings)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    for turn in range(6):
        gradients = [torch.randn(stack.shape, generator=generator) for stack in weights.values()]
        gradients[2] = gradients[2].transpose(1, 2).contiguous().transpose(1, 2)  # as matrix products may lay it out
        factors = [1.0 / (turn + 1), 0.5, 1.0]
        for row, optimizer in enumerate(optimizers):
            for group, rate, gradient in zip(optimizer.param_groups, rates[row], gradients):
                group["lr"] = rate * factors[row]
                group["params"][0].grad = gradient[row].clone()
            optimizer.step()
        update.step(gradients, factors, [True] * 3)
        for row, optimizer in enumerate(optimizers):
            for group, stack in zip(optimizer.param_groups, weights.values()):
                torch.testing.assert_close(stack[row], group["params"][0].detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("cls", [StackedUpdate, FUSED])
def test_models_left_behind_do_not_change_the_others(cls):
    weights, settings, generator = models_of(ADAM)
    kept, kept_settings, _ = models_of(ADAM)
    whole, some = cls("adamw", weights, settings), cls("adamw", kept, kept_settings)
    for turn in range(4):
        gradients = [torch.randn(stack.shape, generator=generator) for stack in weights.values()]
        whole.step([gradient.clone() for gradient in gradients], [1.0] * 3, [True] * 3)
        if turn == 2:
            for name in kept:
                kept[name] = kept[name][[0, 2]]
            some.keep([0, 2])
        if turn < 2:
            for gradient in gradients:
                gradient[1] = float("nan")
            some.step(gradients, [1.0] * 3, [True, False, True])
        else:
            some.step([gradient[[0, 2]] for gradient in gradients], [1.0] * 2, [True] * 2)
    for name in weights:
        assert torch.equal(kept[name], weights[name][[0, 2]])


def test_the_kernel_is_taken_where_there_is_one(monkeypatch):
    weights, settings, _ = models_of(ADAM)
    assert type(make_update("sgd", *models_of(SGD)[:2])) is StackedUpdate
    monkeypatch.setattr(updates._compat, "fused_adam", lambda decoupled: None)
    assert type(make_update("adamw", weights, settings)) is StackedUpdate
