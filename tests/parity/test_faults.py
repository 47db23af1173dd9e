"""Faults put into one side: each is found, and the tensor that is at fault is named first."""

from __future__ import annotations

from typing import Any, Tuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipu_lean.config import Config
from ipu_lean.ipu.emulator import executable, update
from ipu_lean.nn import CausalSelfAttention
from ipu_lean.parity import Comparison, Start, Trace, compare, make_start

from .helpers import config_in, traced

pytestmark = pytest.mark.pod
VALUE = "layers.blocks.1.branches.0.attention.value.linear.weight"
Sound = Tuple[Config, Start, Trace]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: Any) -> Sound:
    """Configuration, start, and the reference's trace."""
    config = config_in(tmp_path_factory.mktemp("faults"))
    start = make_start(config, 2)
    return config, start, traced(config, "cpu", start)


def against(sound: Sound, edit: Any = None) -> Comparison:
    config, start, reference = sound
    return compare(reference, traced(config, "ipu-emulated", start, edit))


def test_no_fault(sound: Sound) -> None:
    assert against(sound).verdict == "pass"


def test_wrong_readout_multiplier(sound: Sound) -> None:
    def edit(model: nn.Module) -> None:
        model.readout.output_mult = 1.001

    found = against(sound, edit)
    assert (found.verdict, found.first.kind, found.first.name) == ("fail", "activation", "readout:TiedReadout")
    assert found.first.relative == pytest.approx(1e-3, rel=1e-2)


def test_attention_divided_by_the_root_of_the_head_size(sound: Sound) -> None:
    def edit(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, CausalSelfAttention):
                assert module.scale != module.head_size**-0.5
                module.scale = module.head_size**-0.5

    found = against(sound, edit)
    assert (found.verdict, found.first.name) == ("fail", "layers.blocks.0.branches.0:AttentionBranch")
    assert found.first.kind == "activation" and "look at what that module computes" in found.diagnosis


def test_one_dropped_gradient(sound: Sound) -> None:
    def edit(model: nn.Module) -> None:
        linear = dict(model.named_modules())[VALUE[: -len(".weight")]]
        linear.forward = lambda x: F.linear(x, linear.weight.detach(), linear.bias)

    found = against(sound, edit)
    assert (found.verdict, found.first.kind, found.first.name) == ("fail", "gradient", VALUE)
    assert VALUE in found.diagnosis and "never arrives" in found.diagnosis
    assert [row.name for row in found.rows if row.kind == "gradient" and row.status == "differs"] == [VALUE]


def test_one_dropped_gradient_of_the_reference(sound: Sound) -> None:
    config, start, _ = sound

    def edit(model: nn.Module) -> None:
        dict(model.named_parameters())[VALUE].register_hook(torch.zeros_like)

    found = compare(traced(config, "cpu", start, edit), traced(config, "ipu-emulated", start))
    assert (found.verdict, found.first.name) == ("fail", VALUE)


def test_mean_over_one_micro_batch_too_few(sound: Sound, monkeypatch: Any) -> None:
    true = update.Accumulator.result
    monkeypatch.setattr(update.Accumulator, "result", lambda self, scale: true(self, scale * 4 / 5))
    found = against(sound)
    assert found.verdict == "fail" and found.first.kind == "gradient" and "every gradient is 1.25 times" in found.diagnosis


def test_one_micro_batch_left_out(sound: Sound, monkeypatch: Any) -> None:
    true = executable.Plan.micro_index
    monkeypatch.setattr(executable.Plan, "micro_index", lambda self, iteration, step, replica: true(
        self, iteration, min(step, self.accumulation - 2), replica))
    found = against(sound)
    assert found.verdict == "fail" and found.first.kind == "gradient" and "micro-batches" in found.diagnosis
    assert any(row.kind == "loss" and row.status == "differs" for row in found.rows)


def test_schedule_one_call_late(sound: Sound, monkeypatch: Any) -> None:
    """Gradients agree; the weights after the first call tell."""
    from ipu_lean.optim import Schedule

    config, start, _ = sound
    reference = traced(config, "cpu", start)
    true = Schedule.lr_at
    monkeypatch.setattr(Schedule, "lr_at", lambda self, index, iterations=1: true(self, index + iterations, iterations))
    found = compare(reference, traced(config, "ipu-emulated", start))
    assert found.verdict == "fail" and found.first.step == 2 and "schedule" in found.diagnosis


@pytest.mark.parametrize(("key", "value"), [("weight_decay", 0.11), ("eps", 2e-8), ("betas", (0.9, 0.951))])
def test_another_setting_of_the_optimizer(sound: Sound, key: str, value: Any) -> None:
    config, start, _ = sound
    changed = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={key: value})})
    found = compare(sound[2], traced(changed, "ipu-emulated", start))
    assert found.verdict == "fail" and found.first.kind in ("loss", "weight") and "decay" in found.diagnosis, found.diagnosis
