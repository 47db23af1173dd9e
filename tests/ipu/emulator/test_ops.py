"""PopTorch's own ops, on CPU and traced (docs/user_guide/overview.rst)."""
from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import nn

import ipu_lean.ipu.emulator as poptorch

from .common import Calls

pytestmark = pytest.mark.pod
X = torch.linspace(-1, 1, 12).reshape(3, 4)


def run(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    executor = poptorch.inferenceModel(Calls(lambda m, *args: function(*args)))
    found = executor(*inputs)
    executor.destroy()
    return found


def test_recomputation_checkpoint_keeps_the_nesting() -> None:
    """python/ops.py:358: one tensor, several, or one container."""
    assert poptorch.recomputationCheckpoint(X) is X
    assert isinstance(poptorch.recomputationCheckpoint(X, X), tuple)
    assert isinstance(poptorch.recomputationCheckpoint([X, X]), list)
    with pytest.raises(ValueError):
        poptorch.recomputationCheckpoint(X, 1)
    assert torch.equal(run(lambda x: poptorch.recomputationCheckpoint(x * 2, x)[0], X), X * 2)


def test_a_checkpoint_does_not_change_the_gradient() -> None:
    """python/ops.py:358."""
    results = []
    for keep in (lambda h: h, poptorch.recomputationCheckpoint, lambda h: poptorch.set_available_memory(h, 0.2), poptorch.nop):
        torch.manual_seed(0)
        made = Calls(lambda m, x, keep=keep: poptorch.identity_loss(keep(torch.tanh(m.layer(x))).square(), "mean"))
        executor = poptorch.trainingModel(made, optimizer=poptorch.optim.SGD(made.parameters(), lr=1.0))
        executor(X)
        results.append(made.layer.weight.detach().clone())
        executor.destroy()
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("call", [poptorch.nop, poptorch.ipu_print_tensor, lambda x: poptorch.set_available_memory(x, 0.1),
                                  lambda x: poptorch.set_overlap_for_input(x, poptorch.OverlapMode.NoOverlap),
                                  lambda x: poptorch.set_overlap_for_output(x, poptorch.OverlapMode.NoOverlap)])
def test_annotations_return_their_tensor_and_take_nothing_else(call: Callable[[Any], Any]) -> None:
    """python/ops.py:49-560, RegisterAtenOverloads.cpp:958-976."""
    assert torch.equal(call(X), X) and torch.equal(run(call, X), X)
    with pytest.raises(poptorch.Error):
        call(3)


def test_serialized_matmul_is_a_matmul() -> None:
    """python/ops.py:388."""
    mode = poptorch.MatMulSerializationMode.ReducingDim
    assert torch.equal(poptorch.serializedMatMul(X, X.t(), mode, 2), X @ X.t())
    assert torch.allclose(run(lambda x: poptorch.serializedMatMul(x, x.t(), mode, 2, True), X), X @ X.t())
    with pytest.raises(AssertionError):
        poptorch.serializedMatMul(X, X.t(), "reducing_dim", 2)


def test_for_loop_runs_count_times_on_device_and_once_on_cpu() -> None:
    """python/ops.py:158; RegisterAtenOverloads.cpp:743-755."""
    assert torch.equal(poptorch.for_loop(5, lambda x: x * 2, [X])[0], X * 2)
    assert torch.equal(run(lambda x: poptorch.for_loop(5, lambda y: y * 2, [x])[0], X), X * 32)
    for wrong in ((X,), [X, 1]):
        with pytest.raises(ValueError):
            poptorch.for_loop(2, lambda x: x, wrong)


def test_cond_picks_by_value() -> None:
    """python/ops.py:201."""
    def choose(flag: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return poptorch.cond(flag, lambda a: a + 1, [x], lambda a: a - 1, [x])[0]

    for flag in (True, False):
        expected = X + 1 if flag else X - 1
        tensor = torch.tensor([flag])
        assert torch.equal(choose(tensor, X), expected) and torch.equal(run(choose, tensor, X), expected)
    with pytest.raises(ValueError):
        poptorch.cond(torch.tensor([True]), lambda a: a, (X,), lambda a: a, [X])


@pytest.mark.parametrize("body", [lambda h: poptorch.for_loop(2, lambda x: x * 2, [h])[0],
                                  lambda h: poptorch.cond(h.sum() > 0, lambda x: x, [h], lambda x: -x, [h])[0],
                                  lambda h: poptorch.CPU(torch.tanh, "tanh")(h)])
def test_loops_conditions_and_host_ops_cannot_train(body: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Compiler.cpp:1485-1488, 1535-1538; tests/loop_test.py:169-189, tests/if_test.py:143."""
    made = Calls(lambda m, x: poptorch.identity_loss(body(m.layer(x)), "mean"))
    with pytest.raises(poptorch.Error, match="only supported in inference"):
        poptorch.trainingModel(made).compile(X)


def test_cpu_is_its_layer_off_the_ipu() -> None:
    """python/ops.py:896-899."""
    layer = nn.Linear(4, 4)
    assert torch.equal(poptorch.CPU(layer, "layer")(X), layer(X)) and not layer.weight.requires_grad


def test_dynamic_slice_and_update() -> None:
    """python/ops.py:289-357: a start that is a tensor, a size that is fixed."""
    start = torch.tensor([1])
    assert torch.equal(poptorch.dynamic_slice(X, 1, start, 2, 1), X[:, 1:3])
    assert torch.equal(run(lambda x, s: poptorch.dynamic_slice(x, 1, s, 3, 2), X, start), X[:, [1, 3]])
    updated = run(lambda x, s: poptorch.dynamic_update(x, torch.ones(3, 2), 1, s, 2), X, start)
    expected = X.clone()
    expected[:, 1:3] = 1
    assert torch.equal(updated, expected)
    for call in (lambda: poptorch.dynamic_slice(X, 1, 1, 2, 1), lambda: poptorch.dynamic_slice(X, 1, start, 2.0, 1),
                 lambda: poptorch.dynamic_update(X, X[0], 1, start, 2), lambda: poptorch.dynamic_update(X, X.int(), 1, start, 2)):
        with pytest.raises(poptorch.Error):
            call()


def test_custom_op_is_zeros_on_cpu_and_refused_in_a_trace() -> None:
    """python/ops.py:787; RegisterAtenOverloads.cpp:802-805."""
    assert torch.equal(poptorch.custom_op([X], "Cube", "custom.ops", 1, [X])[0], torch.zeros_like(X))
    with pytest.raises(ValueError):
        poptorch.custom_op([X], "Cube", "custom.ops", 1, [X], {"scale": None})
    with pytest.raises(poptorch.Error, match="custom op"):
        run(lambda x: poptorch.custom_op([x], "Cube", "custom.ops", 1, [x])[0], X)


def test_contexts_change_nothing() -> None:
    """python/ops.py:1138-1340."""
    def inside(x: torch.Tensor) -> torch.Tensor:
        plan = poptorch.MultiConv().planType(poptorch.MultiConvPlanType.Serial).cycleBackOff(0.1)
        with poptorch.NameScope("a"), plan, poptorch.Attribute(__outline={"layer": "a"}):
            return x + 1

    assert torch.equal(inside(X), X + 1) and torch.equal(run(inside, X), X + 1)
    with pytest.raises(ValueError):
        poptorch.MultiConv().partialsTypes(torch.bfloat16)
    with pytest.raises(AssertionError):
        poptorch.MultiConv().perConvReservedTiles(0.5)
    with pytest.raises(AssertionError):
        poptorch.NameScope(3)


def test_log_levels() -> None:
    """docs/user_guide/overview.rst:1305-1319."""
    import logging

    before = logging.getLogger("poptorch").level
    poptorch.setLogLevel("ERR")
    assert logging.getLogger("poptorch").level == logging.ERROR
    poptorch.setLogLevel(2)
    assert logging.getLogger("poptorch").level == logging.INFO
    with pytest.raises(ValueError):
        poptorch.setLogLevel("LOUD")
    logging.getLogger("poptorch").setLevel(before)
