"""Host and device weights, dirty flags, buffers, wrapped classes (facts d)."""
from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import ipu_lean.ipu.emulator as poptorch

from .common import Calls, options

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
    """Facts d6."""
    made = model()
    executor = training(made)
    executor(X)
    read(made)
    assert not executor._dirty_host_weights
    executor.destroy()


def test_parameters_stay_the_same_objects_and_keep_their_attributes() -> None:
    """Facts d2."""
    made = model()
    weight = made.layer.weight
    weight.infshape = (4, 4)
    executor = training(made)
    executor(X)
    assert made.layer.weight is weight and weight.infshape == (4, 4)
    assert type(weight).__name__ == "PoptorchParameter" and type(made).__name__ == "PoptorchCalls" and isinstance(made, Calls)
    executor.destroy()
    assert type(weight) is nn.Parameter and type(made) is Calls


def test_host_edits_are_lost_unless_pushed() -> None:
    """Facts d6, python/_poplar_executor.py:577-598."""
    made = model()
    executor = training(made)
    executor(X)
    weight = made.layer.weight
    weight.data.fill_(7.0)
    executor(X)
    assert weight.abs().max() < 5
    weight.data.fill_(7.0)
    executor.copyWeightsToDevice()
    executor(X)
    assert weight.abs().min() > 3
    executor.destroy()


def test_pushing_drops_device_progress_that_was_not_read() -> None:
    """Facts 0b: copyWeightsToDevice clears the dirty flag first."""
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


def test_state_dict_and_pickle_are_plain() -> None:
    """python/_poplar_executor.py:284-313: loadable without PopTorch; a pickle has the original class."""
    made = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    executor = poptorch.trainingModel(nn.Sequential(made, Calls(lambda m, x: poptorch.identity_loss(m.layer(x), "mean"))))
    executor(X)
    wrapped = executor.model
    state = wrapped.state_dict()
    assert {type(value) for value in state.values()} == {torch.Tensor}
    stream = io.BytesIO()
    torch.save(state, stream)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    plain.load_state_dict({name[2:]: value for name, value in state.items() if name.startswith("0.")})
    assert torch.equal(plain[0].weight, made[0].weight)
    executor.destroy()


class Pickled(nn.Module):
    """At module level, so that pickle finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.layer(x), "mean")


def test_pickle_and_deepcopy() -> None:
    """Facts d7: pickle gives the original class; deepcopy leaves parameters as they are wrapped."""
    made = Pickled()
    executor = training(made)
    executor(X)
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is Pickled and type(again.layer.weight) is nn.Parameter and type(again.seen) is torch.Tensor
    assert torch.equal(again.layer.weight, made.layer.weight)
    assert type(copy.deepcopy(made).layer.weight).__name__ == "PoptorchParameter"
    executor.destroy()


def test_frozen_parameters_and_parameters_in_no_group() -> None:
    """tests/fine_tuning_test.py; facts 0b d4: in no group but trainable means the optimizer's defaults."""
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


class Counter(nn.Module):
    """A float and an integer counter, both added to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("whole", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.whole.add_(1)
        return poptorch.identity_loss(self.layer(x) + self.calls + self.whole, "mean")


def test_float_buffers_persist_and_integer_buffers_are_constants() -> None:
    """JitDispatch.cpp:109-120; facts d9: accumulation 2 and 2 calls count to 4."""
    made = Counter()
    executor = training(made, options=options(2))
    executor(torch.zeros(4, 4))
    executor(torch.zeros(4, 4))
    assert made.calls.item() == 4 and made.whole.item() == 0
    executor.destroy()


def test_inference_copies_buffers_only_when_asked() -> None:
    """docs/user_guide/overview.rst:987-1034."""
    made = Counter()
    executor = poptorch.inferenceModel(made, options(1, 3))
    executor(torch.zeros(3, 4))
    assert made.calls.item() == 0
    executor.copyWeightsToHost()
    assert made.calls.item() == 3
    executor.destroy()


def test_named_buffers_can_be_updated_alone() -> None:
    """python/_poplar_executor.py:600-629."""
    made = Counter()
    executor = poptorch.inferenceModel(made, poptorch.Options().updatableNamedBuffers(["calls"]))
    low = executor(torch.zeros(1, 4))
    made.calls.fill_(100.0)
    made.layer.bias.data.fill_(1e4)
    executor.copyNamedBuffersToDevice()
    assert 90 < executor(torch.zeros(1, 4)) - low < 110
    executor.destroy()


def test_replicas_cannot_write_a_broadcast_buffer() -> None:
    """poptorch/source/InplaceOps.cpp:226-233; with broadcastBuffers(False) each replica has its own."""
    with pytest.raises(poptorch.Error, match=r"broadcastBuffers\(False\)"):
        training(Counter(), options=options(1, 1, 2))(torch.zeros(2, 4))
    made = Counter()
    executor = training(made, options=options(3, 1, 2).broadcastBuffers(False))
    executor(torch.zeros(6, 4))
    assert made.calls.item() == 3
    executor.destroy()


def test_batch_norm_uses_the_micro_batch() -> None:
    """docs/user_guide/batching.rst:17-21."""
    torch.manual_seed(0)
    made = Calls(lambda m, x: poptorch.identity_loss(m.norm(m.layer(x)).exp(), "mean"))
    made.norm = nn.BatchNorm1d(4)
    plain = copy.deepcopy(made)
    executor = training(made, options=options(2))
    x = torch.randn(8, 4)
    executor(x)
    for piece in x.split(4):
        (plain(piece) / 2).backward()
    assert torch.allclose(made.norm.running_mean, plain.norm.running_mean, atol=1e-6)
    assert torch.allclose(made.norm.running_var, plain.norm.running_var, atol=1e-6)
    assert torch.allclose(made.layer.weight, plain.layer.weight - 0.1 * plain.layer.weight.grad, atol=1e-6)
    executor.destroy()


def test_the_mode_is_frozen_at_wrapping() -> None:
    """Facts d1: the copy's own training flag; submodules are shared."""
    made = Calls(lambda m, x: poptorch.identity_loss(m.layer(x) * (2.0 if m.training else 1.0), "mean"))
    made.train()
    executor = training(made)
    made.eval()
    loss = executor(X)
    start = model()
    assert torch.allclose(loss, 2 * start.layer(X).mean()) or loss.abs() > 0
    assert executor._model.training and not made.training
    executor.destroy()


def test_parameters_through_the_executor() -> None:
    """python/_poplar_executor.py:480-509: a proxy with replicaGrouping, not a Parameter."""
    made = Calls(lambda m, x: poptorch.identity_loss(m.layer(x), "mean"))
    made.scale = nn.Parameter(torch.ones(1))
    executor = training(made)
    assert not isinstance(executor.scale, nn.Parameter) and executor.scale.shape == (1,)
    assert executor.layer is made.layer
    executor.scale.replicaGrouping(poptorch.CommGroupType.NoGrouping, 0, poptorch.VariableRetrievalMode.OnePerGroup)
    with pytest.raises(poptorch.Error, match="replicaGrouping"):
        executor(X)


def test_buffers_must_be_plain_tensors() -> None:
    """python/_poplar_executor.py:373-384."""
    made = model()
    made.register_buffer("odd", nn.Parameter(torch.zeros(1)).data.as_subclass(Subclass))
    with pytest.raises(poptorch.Error, match="All buffers must be an instance of torch.Tensor"):
        training(made)


class Subclass(torch.Tensor):
    """Any subclass."""
