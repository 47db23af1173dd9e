"""Host and device weights, dirty flags, buffers, wrapped classes."""
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ipu_lean.ipu.emulator as poptorch

from .common import Calls

pytestmark = pytest.mark.pod
X = torch.linspace(-1, 1, 12).reshape(3, 4)


def model() -> Calls:
    torch.manual_seed(0)
    return Calls(lambda m, x: poptorch.identity_loss(m.layer(x).square(), "mean"))


def training(made: nn.Module, **kw: Any) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(made, optimizer=poptorch.optim.SGD(made.parameters(), lr=0.1), **kw)


def test_reading_a_parameter_copies_the_weights_back() -> None:
    """python/_poplar_executor.py:245-384: any attribute read syncs when the host is out of date."""
    made = model()
    before = made.layer.weight.detach().clone()
    executor = training(made)
    executor(X)
    assert executor._dirty_host_weights
    assert made.layer.weight.requires_grad and not executor._dirty_host_weights
    assert not torch.equal(made.layer.weight, before)
    assert executor.copyWeightsToHostIfNeeded() is False
    executor(X)
    assert executor.copyWeightsToHostIfNeeded() is True
    executor.destroy()


@pytest.mark.parametrize("read", [lambda m: m.state_dict(), lambda m: list(m.parameters()),
                                  lambda m: m.copyWeightsToHostIfNeeded(), lambda m: torch.equal(m.layer.weight, X)])
def test_what_else_copies_them_back(read: Any) -> None:
    """python/_poplar_executor.py:246-356, 543-553: reading the state or a parameter fetches what the device changed."""
    made = model()
    executor = training(made)
    executor(X)
    read(made)
    assert not executor._dirty_host_weights
    executor.destroy()


def test_parameters_stay_the_same_objects_and_keep_their_attributes() -> None:
    """python/_poplar_executor.py:245-384: wrapping changes classes, not objects."""
    made = model()
    weight = made.layer.weight
    weight.infshape = (4, 4)
    executor = training(made)
    executor(X)
    assert made.layer.weight is weight and weight.infshape == (4, 4)
    assert type(weight).__name__ == "PoptorchParameter" and type(made).__name__ == "PoptorchCalls" and isinstance(made, Calls)
    executor.destroy()
    assert type(weight) is nn.Parameter and type(made) is Calls


def test_host_edits_are_lost_unless_pushed(caplog: pytest.LogCaptureFixture) -> None:
    """python/_poplar_executor.py:555-598: the next fetch overwrites them. The emulator warns, which PopTorch does not."""
    made = model()
    executor = training(made)
    executor(X)
    weight = made.layer.weight
    weight.data.fill_(7.0)
    executor(X)
    assert "layer.weight" in caplog.text and "copyWeightsToDevice" in caplog.text
    caplog.clear()
    assert weight.abs().max() < 5
    weight.data.fill_(7.0)
    executor.copyWeightsToDevice()
    executor(X)
    assert weight.abs().min() > 3 and caplog.text == ""
    executor.destroy()


def test_pushing_drops_device_progress_that_was_not_read() -> None:
    """python/_poplar_executor.py:577-598: copyWeightsToDevice clears the dirty flag first."""
    made = model()
    before = made.layer.weight.detach().clone()
    executor = training(made)
    executor(X)
    executor.copyWeightsToDevice()
    assert torch.equal(made.layer.weight, before)
    executor.destroy()


def test_load_state_dict_pushes_when_attached_and_waits_otherwise() -> None:
    """python/_poplar_executor.py:458-473: needs neither compile nor attach."""
    made = model()
    state = {name: torch.full_like(value, 2.0) for name, value in made.state_dict().items()}
    executor = training(made)
    executor.load_state_dict(state)
    executor(X)
    first = made.layer.weight.detach().clone()
    executor.detachFromDevice()
    executor.load_state_dict(state)
    executor(X)
    assert torch.equal(made.layer.weight, first)
    executor.load_state_dict(state)
    executor(X)
    assert torch.equal(made.layer.weight, first)
    executor.destroy()


def test_copies_need_a_compiled_model() -> None:
    """python/_poplar_executor.py:555-600."""
    executor = training(model())
    for call in (executor.copyWeightsToHost, executor.copyWeightsToDevice, executor.copyNamedBuffersToDevice,
                 executor.detachFromDevice, executor.attachToDevice, lambda: executor.rng_state):
        with pytest.raises(poptorch.Error, match="not been compiled"):
            call()
    assert not executor.isCompiled() and not executor.isAttachedToDevice()


def test_attach_and_detach() -> None:
    """python/_poplar_executor.py:1548-1592."""
    made = model()
    executor = training(made)
    executor(X)
    with pytest.raises(poptorch.Error, match="already attached"):
        executor.attachToDevice()
    executor.detachFromDevice()
    assert executor.isCompiled() and not executor.isAttachedToDevice() and not executor._dirty_host_weights
    with pytest.raises(poptorch.Error, match="not attached"):
        executor.detachFromDevice()
    executor(X)
    assert executor.isAttachedToDevice()
    executor.destroy()


def test_training_goes_on_over_a_detach() -> None:
    """Momentum, weights and random state survive."""
    results = []
    for interrupted in (False, True):
        torch.manual_seed(0)
        made = Calls(lambda m, x: poptorch.identity_loss(torch.dropout(m.layer(x), 0.5, True).square(), "mean"))
        executor = poptorch.trainingModel(made, poptorch.Options().randomSeed(3),
                                          poptorch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9))
        for _ in range(3):
            executor(X)
            if interrupted:
                executor.detachFromDevice()
        results.append(made.layer.weight.detach().clone())
        executor.destroy()
    assert torch.equal(results[0], results[1])


def test_inference_follows_training() -> None:
    """python/_poplar_executor.py:1245-1262: weights follow without a call."""
    made = model()
    executor = training(made)
    executor(X)
    executor.detachFromDevice()
    twin = poptorch.inferenceModel(made)
    first = twin(X)
    twin.detachFromDevice()
    executor(X)
    executor.detachFromDevice()
    assert twin(X) < first
    twin.detachFromDevice()
    assert torch.allclose(twin(X), made(X))
    twin.destroy()
    executor.destroy()


def test_wrapping_twice_is_an_error_until_destroyed() -> None:
    """python/__init__.py:660-717; destroy is a no-op before compile (:1482-1501)."""
    made = model()
    executor = training(made)
    with pytest.raises(RuntimeError, match="already been wrapped"):
        training(made)
    executor.destroy()
    with pytest.raises(RuntimeError):
        training(made)
    executor(X)
    made.destroy()
    assert not executor.isCompiled()
    training(made)


def test_frozen_parameters_and_parameters_in_no_group() -> None:
    """tests/fine_tuning_test.py; popart optimizervaluemap.cpp:37-43: trainable but in no group takes the defaults."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    step = Calls(lambda m, x: poptorch.identity_loss(m.net(x), "mean"))
    step.net = made
    made[1].weight.requires_grad_(False)
    start = copy.deepcopy(made)
    groups = [{"params": made[0].parameters(), "lr": 0.5}]
    executor = poptorch.trainingModel(step, optimizer=poptorch.optim.SGD(groups, lr=0.25))
    executor(X)
    start(X).mean().backward()
    assert torch.equal(made[1].weight, start[1].weight)
    for index, lr in ((0, 0.5), (2, 0.25)):
        assert start[index].weight.grad.norm() > 0
        assert torch.allclose(made[index].weight, start[index].weight - lr * start[index].weight.grad, atol=1e-6)
    executor.destroy()


def test_a_group_with_a_foreign_parameter_is_a_key_error() -> None:
    """python/_poplar_executor.py:805-836."""
    made = model()
    other = nn.Linear(2, 2)
    executor = poptorch.trainingModel(made, optimizer=poptorch.optim.SGD([*made.parameters(), *other.parameters()], lr=0.1))
    with pytest.raises(KeyError):
        executor(X)


def test_tied_parameters_stay_tied() -> None:
    """python/_poplar_executor.py:742-774."""
    torch.manual_seed(0)
    made = Calls(lambda m, x: poptorch.identity_loss(m.again(torch.tanh(m.layer(x))).square(), "mean"))
    made.again = nn.Linear(4, 4)
    made.again.weight = made.layer.weight
    plain = copy.deepcopy(made)
    executor = training(made)
    executor(X)
    plain(X).backward()
    assert made.again.weight is made.layer.weight
    assert torch.allclose(made.layer.weight, plain.layer.weight - 0.1 * plain.layer.weight.grad, atol=1e-6)
    executor.destroy()
