"""Buffers, pickles and what the executor shows of its model."""
from __future__ import annotations

import copy
import io
import pickle
from typing import Tuple

import pytest
import torch
from torch import nn

import ipu_lean.ipu.emulator as poptorch

from .common import Calls, options
from .test_weights import X, model, training

pytestmark = pytest.mark.pod


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
    """python/_impl.py:282-337: pickle gives the original class; deepcopy leaves parameters as they are wrapped."""
    made = Pickled()
    executor = training(made)
    executor(X)
    again = pickle.loads(pickle.dumps(made))
    assert type(again) is Pickled and type(again.layer.weight) is nn.Parameter and type(again.seen) is torch.Tensor
    assert torch.equal(again.layer.weight, made.layer.weight)
    assert type(copy.deepcopy(made).layer.weight).__name__ == "PoptorchParameter"
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
    """JitDispatch.cpp:109-120; a buffer changes once per micro-batch: accumulation 2 and 2 calls count to 4."""
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
    """python/__init__.py:710 traces a shallow copy: the copy's own training flag; submodules are shared."""
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


class Several(nn.Module):
    """Two buffers whose names are in the order of the alphabet, or not; and one that nobody reads."""

    def __init__(self, names: Tuple[str, str]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.names = names
        for name in (*names, "unread"):
            self.register_buffer(name, torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = (getattr(self, name) for name in self.names)
        return poptorch.identity_loss(0.0 * self.layer(x) + one + 10.0 * other, "mean")


@pytest.mark.parametrize("names, expected", [(("a", "b"), 21.0), (("b", "a"), 12.0)])
def test_named_buffers_arrive_in_the_order_of_the_alphabet(names: Tuple[str, str], expected: float) -> None:
    """poptorch/source/PoplarExecutable.cpp:209 hands a sorted map to buffers that were registered in the graph's order
    (LowerToPopart.cpp:1060). Training goes on, and the optimizer's state is fetched (python/_poplar_executor.py:616)."""
    made = Several(names)
    optimizer = poptorch.optim.Adam(made.parameters(), lr=0.1)
    executor = poptorch.trainingModel(made, poptorch.Options().updatableNamedBuffers(list(names)), optimizer)
    assert executor(X).item() == 0.0
    getattr(made, names[0]).fill_(1.0)
    getattr(made, names[1]).fill_(2.0)
    assert optimizer.host_state_is_dirty
    executor.copyNamedBuffersToDevice()
    assert not optimizer.host_state_is_dirty
    assert executor(X).item() == expected
    executor.destroy()


@pytest.mark.parametrize("name", ["unread", "nowhere"])
def test_an_updatable_buffer_is_one_that_the_graph_reads(name: str) -> None:
    """tests/buffers_test.py:103."""
    with pytest.raises(poptorch.Error, match=f"{name}, named by Options.updatableNamedBuffers"):
        poptorch.inferenceModel(Several(("a", "b")), poptorch.Options().updatableNamedBuffers([name]))(X)
