"""What is traced: one marked loss that is returned last, few numbers out, operations that PopTorch has."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Dict, Tuple

import pytest
import torch
from torch import nn

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.ipu import PopTrainStep, make_optimizer, make_options, place, to_precision
from ipu_lean.ipu.emulator.examine import examine
from ipu_lean.models import TrainStep
from tests.ipu.helpers import batch_for, ipu_config, lively

pytestmark = pytest.mark.pod

MODELS: Dict[str, Dict[str, Any]] = {
    "quickstart": {},
    "untied": {"tied": False},
    "residual": {"stack": {"kind": "residual"}},
    "aaff": {"stack": {"order": "aaff"}},
    "rmsnorm, swiglu, sandwich": {"norm": "rmsnorm", "activation": "swiglu", "sandwich": True},
    "learned positions, no bias": {"positions": "learned", "bias": False},
    "sinusoidal positions, relu": {"positions": "sinusoidal", "activation": "relu"},
    "no positions, silu": {"positions": "none", "activation": "silu"},
    "dropout": {"dropout": 0.1, "attention_dropout": 0.1, "embedding_dropout": 0.1},
    "shared layers": {"num_hidden_groups": 1, "num_inner_groups": 2},
    "momentum": {"stack": {"coupling": "momentum"}},
    "modified momentum": {"stack": {"coupling": "modified-momentum", "output": "gate"}},
    "mean": {"stack": {"coupling": "mean", "output": "gate-channels"}},
    "affine": {"stack": {"coupling": "affine", "output": "concat"}, "tied": False},
    "split": {"stack": {"input": "split"}},
    "zeros": {"stack": {"input": "zeros"}},
}


def looked_at(config: Any, model: nn.Module) -> Any:
    inputs = tuple(torch.from_numpy(array) for array in batch_for(config, config.batch.device_iterations))
    options, optimizer = make_options(config, poptorch).train, make_optimizer(model, config, poptorch)
    return examine(PopTrainStep(model, poptorch), inputs, options=options, optimizer=optimizer)


@pytest.mark.parametrize("precision", ["fp32", "fp16-ipu"])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_compiles(name: str, precision: str) -> None:
    section: Dict[str, Any] = {"emulate_precision": precision != "fp32"}
    if name == "shared layers":
        section["layers_per_ipu"] = [4]
    config = ipu_config(model=MODELS[name], precision=precision, ipu=section)
    model = to_precision(lively(config), config)
    place(model, config, poptorch)
    report = looked_at(config, model)
    assert [str(item) for item in report.violations] == []
    assert [str(item) for item in report.notes] == []
    assert report.functions == {}


def test_long_losses_are_chunked_and_compile() -> None:
    config = ipu_config(memory={"loss_chunk": 5})
    model = lively(config)
    place(model, config, poptorch)
    assert [str(item) for item in looked_at(config, model).violations] == []


def test_only_a_few_numbers_leave_the_device() -> None:
    """A returned activation would be a host stream of its own size (poptorch issue 9)."""
    config = ipu_config()
    model = lively(config)
    inputs = tuple(torch.from_numpy(array) for array in batch_for(config, 2))
    step = PopTrainStep(model, poptorch)
    executor = poptorch.trainingModel(step, make_options(config, poptorch).train, make_optimizer(model, config, poptorch))
    loss, sums = executor(*inputs)
    micro_batches = 2 * 5
    assert loss.shape == (micro_batches,) and sums.shape == (3 * micro_batches,)
    executor.destroy()


def test_the_same_numbers_as_the_step_of_other_devices() -> None:
    config = ipu_config()
    tokens, labels = (torch.from_numpy(array) for array in batch_for(config, 1))
    plain, traced = lively(config), lively(config)
    plain.layers.engine = "invert"
    wanted, sums = TrainStep(plain)(tokens, labels)
    loss, own = PopTrainStep(traced, poptorch)(tokens, labels)
    assert abs(loss.item() - wanted.item()) < 1e-6 * wanted.item()
    torch.testing.assert_close(own, sums, rtol=1e-6, atol=0)
    wanted.backward()
    loss.backward()
    for (name, one), other in zip(plain.named_parameters(), traced.parameters()):
        if "key.linear.bias" in name:
            continue  # its true gradient is zero
        assert float(one.grad.norm()) > 0, name
        assert float((one.grad - other.grad).norm() / one.grad.norm()) < 1e-5, name


class Counting(PopTrainStep):
    """Counts calls of its own forward."""

    calls = 0

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        Counting.calls += 1
        return super().forward(tokens, labels)


def test_forward_runs_once_however_many_steps_follow() -> None:
    config = ipu_config()
    model = lively(config)
    Counting.calls = 0
    executor = poptorch.trainingModel(
        Counting(model, poptorch), make_options(config, poptorch).train, make_optimizer(model, config, poptorch)
    )
    for seed in range(4):
        executor(*[torch.from_numpy(array) for array in batch_for(config, 2, seed)])
    assert Counting.calls == 1
    executor.destroy()


class Scaled(PopTrainStep):
    """Changes the loss after it was marked: the device would train the marked value."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        loss, sums = super().forward(tokens, labels)
        return loss * 0.5, sums


def test_a_loss_scaled_after_the_mark_is_noticed() -> None:
    config = ipu_config()
    model = lively(config)
    inputs = tuple(torch.from_numpy(array) for array in batch_for(config, 2))
    report = examine(Scaled(model, poptorch), inputs, options=make_options(config, poptorch).train)
    assert report.violations or report.notes


def test_a_step_can_be_copied() -> None:
    config = ipu_config()
    tokens, labels = (torch.from_numpy(array) for array in batch_for(config, 1))
    step = PopTrainStep(lively(config), poptorch)
    assert torch.equal(deepcopy(step)(tokens, labels)[0], step(tokens, labels)[0])


def test_halved_models_keep_their_parameters() -> None:
    config = ipu_config(precision="fp16-ipu", ipu={"emulate_precision": True})
    model = lively(config)
    before = [id(parameter) for parameter in model.parameters()]
    assert to_precision(model, config) is model
    assert [id(parameter) for parameter in model.parameters()] == before
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
    single = lively(ipu_config())
    assert {parameter.dtype for parameter in to_precision(single, ipu_config()).parameters()} == {torch.float32}
