"""Batches, device iterations, accumulation, replicas, output modes (docs/user_guide/batching.rst)."""
from __future__ import annotations

import copy
from typing import Any, List

import pytest
import torch
from torch import nn

import ipu_lean.ipu.emulator as poptorch

from .common import Calls, Classifier, gap, options, plain_steps, tokens

pytestmark = pytest.mark.pod
Mode = poptorch.OutputMode


@pytest.mark.parametrize(("iterations", "accumulation", "replicas"), [(1, 1, 1), (2, 3, 1), (2, 3, 2)])
def test_training_equals_plain_torch(iterations: int, accumulation: int, replicas: int) -> None:
    """options.py:278-305, tests/batching_test.py:210-272: the mean over micro-batches and replicas, one update an iteration."""
    torch.manual_seed(0)
    model = Classifier()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    executor = poptorch.trainingModel(model, options(accumulation, iterations, replicas, Mode.All),
                                      poptorch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1))
    for step in range(4):
        batch = tokens(2 * iterations * accumulation * replicas, seed=step)
        _, losses = executor(*batch)
        updates = plain_steps(plain, optimizer, batch, iterations, accumulation * replicas)
        expected = [loss for update in updates for loss in update]
        assert torch.allclose(losses.reshape(-1), torch.tensor(expected), rtol=1e-5)
    assert gap(model, plain) < 1e-5
    executor.destroy()


def test_sum_reduction() -> None:
    """options.py:278-305."""
    def run(reduction: Any, accumulation: int) -> torch.Tensor:
        torch.manual_seed(0)
        model = Calls(lambda m, x: poptorch.identity_loss(m.layer(x).square(), "mean"))
        made = options(accumulation)
        made.Training.accumulationAndReplicationReductionType(reduction)
        executor = poptorch.trainingModel(model, made, poptorch.optim.SGD(model.parameters(), lr=0.1))
        before = model.layer.weight.detach().clone()
        executor(torch.linspace(-1, 1, 24).reshape(6, 4))
        change = model.layer.weight.detach() - before
        executor.destroy()
        return change

    mean, total = run(poptorch.ReductionType.Mean, 3), run(poptorch.ReductionType.Sum, 3)
    assert mean.norm() > 0 and torch.allclose(total, 3 * mean, atol=1e-6)


@pytest.mark.parametrize("wrong", [(7, 4), (5, 4)])
def test_every_input_is_a_multiple_of_the_whole_batch(wrong: Any) -> None:
    """python/_poplar_executor.py:1503-1537: AssertionError with the numbers; a scalar counts as one row."""
    executor = poptorch.trainingModel(Calls(lambda m, x: poptorch.identity_loss(m.layer(x), "mean")), options(3, 2))
    with pytest.raises(AssertionError, match=r"Invalid batch dimension.*deviceIterations\(2\).*gradientAccumulation\(3\) = 6"):
        executor(torch.zeros(wrong))
    two = poptorch.inferenceModel(Calls(lambda m, x, s: m.layer(x) * s), options(1, 2))
    with pytest.raises(AssertionError, match=r"dimension \(1\)"):
        two(torch.zeros(2, 4), torch.tensor(1.0))
    one = poptorch.inferenceModel(Calls(lambda m, x, s: m.layer(x) * s))
    assert one(torch.zeros(2, 4), torch.tensor(0.0)).shape == (2, 4)
    one.destroy()


def rows(executor: poptorch.PoplarExecutor, count: int) -> List[Any]:
    x = torch.arange(float(count)).reshape(count, 1)
    whole, scalar, constant = executor(x)
    return [whole.reshape(-1).tolist(), scalar.tolist(), tuple(constant.shape)]


def numbers(made: poptorch.Options, count: int) -> List[Any]:
    def forward(m: nn.Module, x: torch.Tensor) -> Any:
        return x, poptorch.identity_loss(x.sum() + 0 * m.layer.weight.sum(), "none"), torch.ones(5)

    executor = poptorch.trainingModel(Calls(forward), made)
    found = rows(executor, count)
    executor.destroy()
    return found


def test_output_modes() -> None:
    """Compiler.cpp:1305-1337: 2 iterations, 2 accumulation steps, 1 replica, micro-batch 2."""
    whole = [0, 1, 2, 3, 4, 5, 6, 7]
    assert numbers(options(2, 2, mode=Mode.All), 8) == [whole, [1, 5, 9, 13], (5,)]
    assert numbers(options(2, 2, mode=Mode.Final), 8) == [[6, 7], 13, (5,)]
    assert numbers(options(2, 2, mode=Mode.Sum), 8) == [[0 + 2 + 4 + 6, 1 + 3 + 5 + 7], 28, (5,)]
    assert numbers(options(2, 2).outputMode(Mode.EveryN, 2), 8) == [[2, 3, 6, 7], [5, 13], (5,)]


def test_output_modes_of_replicas() -> None:
    """Compiler.cpp:1305-1337: each replica returns; Sum does not add replicas."""
    assert numbers(options(2, 1, 2, Mode.All), 8) == [[0, 1, 2, 3, 4, 5, 6, 7], [1, 5, 9, 13], (5,)]
    assert numbers(options(2, 1, 2, Mode.Final), 8) == [[4, 5, 6, 7], [9, 13], (5,)]
    assert numbers(options(2, 1, 2, Mode.Sum), 8) == [[4, 6, 8, 10], [10, 18], (5,)]


def test_default_output_modes() -> None:
    """python/_poplar_executor.py:163-180: Final in training, All in inference."""
    assert numbers(options(2, 2), 8) == numbers(options(2, 2, mode=Mode.Final), 8)
    executor = poptorch.inferenceModel(Calls(lambda m, x: x), options(1, 3))
    assert executor(torch.arange(6.0)).tolist() == [0, 1, 2, 3, 4, 5]
    executor.destroy()


def test_input_groups_share_their_rows() -> None:
    """options.py:1474-1506, CompilerImpl.cpp:303-346: consecutive and orthogonal groups of replicas."""
    def run(kind: Any) -> List[float]:
        made = options(1, 1, 4, Mode.All).inputReplicaGrouping(2, kind)
        executor = poptorch.inferenceModel(Calls(lambda m, x: x), made)
        found = executor(torch.tensor([1.0, 2.0])).tolist()
        executor.destroy()
        return found

    assert run(poptorch.CommGroupType.Consecutive) == [1, 1, 2, 2]
    assert run(poptorch.CommGroupType.Orthogonal) == [1, 2, 1, 2]


def test_losses_are_not_averaged() -> None:
    """popart_compiler/source/Compiler.cpp:1305-1337: each micro-batch's own loss comes back."""
    assert numbers(options(4, 1, mode=Mode.All), 4)[1] == [0, 1, 2, 3]


def test_shapes_types_and_values_are_fixed_at_compile_time() -> None:
    """python/_args_parser.py:58-143: any change of shape is an Error."""
    executor = poptorch.inferenceModel(Calls(lambda m, x, scale, flag=True: x * scale if flag else x), options(1, 2))
    executor(torch.zeros(4, 2), 2)
    for other, match in ((lambda: executor(torch.zeros(8, 2), 2), "Shape mismatch"),
                         (lambda: executor(torch.zeros(4, 2, dtype=torch.int32), 2), "Data type mismatch"),
                         (lambda: executor(torch.zeros(4, 2), 3), "Value mismatch"),
                         (lambda: executor(torch.zeros(4, 2), 2.0), "Type mismatch")):
        with pytest.raises(poptorch.Error, match=match):
            other()
    executor.destroy()


def test_arguments_follow_the_signature() -> None:
    """python/_args_parser.py:150-330."""
    class Named(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, shift: float = 1.0) -> torch.Tensor:
            return x - y + shift

    executor = poptorch.inferenceModel(Named())
    assert executor(y=torch.zeros(1), x=torch.ones(1)).item() == 2.0
    with pytest.raises(AssertionError, match="not valid parameters"):
        executor(torch.zeros(1), z=torch.zeros(1))
    with pytest.raises(AssertionError, match="Too many arguments"):
        executor(*[torch.zeros(1)] * 4)
    with pytest.raises(poptorch.Error, match="Mandatory parameter y"):
        executor(torch.zeros(1))
    executor.destroy()


def test_the_structure_of_outputs_is_rebuilt() -> None:
    """python/_poplar_executor.py:1300-1306: python values are frozen at their traced ones."""
    executor = poptorch.inferenceModel(Calls(lambda m, x: {"a": (x, [x + 1]), "n": 3, "none": None}))
    found = executor(torch.zeros(2))
    assert found["a"][1][0].tolist() == [1, 1] and found["n"] == 3 and found["none"] is None
    with pytest.raises(poptorch.Error, match="backward"):
        found["a"][0].backward()
    executor.destroy()


def test_inputs_that_are_not_contiguous_and_that_require_grad(caplog: pytest.LogCaptureFixture) -> None:
    """python/_args_parser.py:290, _poplar_executor.py:1011-1020: converted, detached, with warnings."""
    executor = poptorch.inferenceModel(Calls(lambda m, x: x.view(6)))
    base = torch.arange(6.0).reshape(2, 3).t().requires_grad_(True)
    assert executor(base).tolist() == [0, 3, 1, 4, 2, 5]
    text = " ".join(record.getMessage() for record in caplog.records)
    assert "not contiguous" in text and "requires_grad" in text
    executor.destroy()


def test_writing_into_an_input_leaves_the_hosts_tensor_alone() -> None:
    executor = poptorch.inferenceModel(Calls(lambda m, x: x.add_(1)))
    x = torch.zeros(2)
    assert executor(x).tolist() == [1, 1] and executor(x).tolist() == [1, 1] and x.tolist() == [0, 0]
    executor.destroy()


def test_inference_refuses_accumulation() -> None:
    """python/_poplar_executor.py:184-225."""
    with pytest.raises(poptorch.Error, match="gradientAccumulation must be 1"):
        poptorch.inferenceModel(nn.Identity(), options(2))


def test_synthetic_data_ignores_the_hosts() -> None:
    """options.py:1763: random normal inputs made on the device."""
    executor = poptorch.inferenceModel(nn.Identity(), poptorch.Options().enableSyntheticData(True))
    assert executor(torch.zeros(64)).std() > 0.5
    executor.destroy()
