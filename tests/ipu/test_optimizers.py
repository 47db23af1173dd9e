"""muP's groups over poptorch.optim: what is variable, what PopTorch alone has, and the numbers beside torch's."""

from __future__ import annotations

import math
from typing import Any, Dict

import pytest
import torch

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.config.layout import loss_scaling
from ipu_lean.ipu import PopTrainStep, make_optimizer, make_options
from ipu_lean.optim import apply_schedule, build_optimizer
from tests.ipu.helpers import batch_for, ipu_config, lively

pytestmark = pytest.mark.pod

KINDS: Dict[str, Dict[str, Any]] = {
    "adamw": {"kind": "adamw"},
    "adam": {"kind": "adam", "weight_decay": 0.0},
    "sgd": {"kind": "sgd", "momentum": 0.9, "nesterov": True},
}
CLASSES = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD"}


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_those_of_the_other_devices(kind: str) -> None:
    config = ipu_config(optimizer=KINDS[kind])
    model = lively(config)
    ours, plain = make_optimizer(model, config, poptorch), build_optimizer(model, config)
    assert type(ours) is getattr(poptorch.optim, CLASSES[kind])
    assert len(ours.param_groups) == len(plain.param_groups) > 2
    for one, other in zip(ours.param_groups, plain.param_groups):
        assert [id(parameter) for parameter in one["params"]] == [id(parameter) for parameter in other["params"]]
        shared = ("lr", "weight_decay", "eps", "betas", "momentum", "nesterov", "lr_mult", "initial_lr", "kind")
        assert {key: one.get(key) for key in shared} == {key: other.get(key) for key in shared}


@pytest.mark.parametrize("kind", KINDS)
def test_lr_and_decay_stay_variable(kind: str) -> None:
    config = ipu_config(optimizer=KINDS[kind])
    attributes = make_optimizer(lively(config), config, poptorch).variable_attrs
    assert not attributes.isConstant("lr") and not attributes.isConstant("weight_decay")


@pytest.mark.parametrize("clip, wanted", [(None, math.inf), (0.5, 0.5)])
def test_clipping_is_handed_to_the_device(clip: Any, wanted: float) -> None:
    config = ipu_config(train={"clip": clip})
    assert make_optimizer(lively(config), config, poptorch).max_grad_norm == wanted


def test_types_in_fp32_and_fp16() -> None:
    full = make_optimizer(lively(ipu_config()), ipu_config(), poptorch)
    assert full.accum_type == full.first_order_momentum_accum_type == torch.float32 and full.loss_scaling == 1.0
    config = ipu_config(precision="fp16-ipu", ipu={"emulate_precision": True})
    half = make_optimizer(lively(config), config, poptorch)
    assert half.accum_type == half.first_order_momentum_accum_type == torch.float16
    assert half.second_order_momentum_accum_type == torch.float32
    config = ipu_config(ipu={"accumulator": "half", "first_moment": "half"}, optimizer=KINDS["sgd"])
    assert make_optimizer(lively(config), config, poptorch).velocity_accum_type == torch.float16


def test_the_fp16_loss_scale_grows_with_width_under_mup() -> None:
    section = {"emulate_precision": True}
    config = ipu_config(precision="fp16-ipu", ipu={**section, "loss_scaling": 64.0})
    assert loss_scaling(config) == 64.0 * 16 / 8
    assert make_optimizer(lively(config), config, poptorch).loss_scaling == 128.0
    assert loss_scaling(ipu_config(ipu={"loss_scaling": 64.0})) == 64.0  # fp32: no effect on the numbers
    standard = {"parametrization": "standard", "base_width": None}
    assert loss_scaling(ipu_config(precision="fp16-ipu", ipu={**section, "loss_scaling": 64.0}, mup=standard)) == 64.0


def test_the_rate_can_change_after_compilation() -> None:
    config = ipu_config()
    model = lively(config)
    optimizer = make_optimizer(model, config, poptorch)
    executor = poptorch.trainingModel(PopTrainStep(model, poptorch), make_options(config, poptorch).train, optimizer)
    inputs = [torch.from_numpy(array) for array in batch_for(config, 2)]
    executor(*inputs)
    before = {name: value.clone() for name, value in executor.state_dict().items()}
    apply_schedule(optimizer, 0.0)
    executor.setOptimizer(optimizer)
    executor(*inputs)
    after = executor.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    executor.destroy()
