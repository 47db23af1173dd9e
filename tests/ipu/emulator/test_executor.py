"""The executor's other members, random numbers, and a reversible backward inside the traced step."""
from __future__ import annotations

from typing import Any, List, Tuple

import pytest
import torch
from torch import nn

import ipu_lean.ipu.emulator as poptorch

from .common import Calls, options

pytestmark = pytest.mark.pod
X = torch.ones(64)


def dropping(seed: int = 0, train: bool = True, **kw: Any) -> poptorch.PoplarExecutor:
    layer = nn.Dropout(0.5).train(train)
    made = poptorch.Options().randomSeed(seed) if not kw else kw["made"]
    return poptorch.inferenceModel(layer, made)


def test_dropout_draws_on_the_device_from_the_seed() -> None:
    """python/options.py:1740, tests/random_sampling_test.py:49-59: its own numbers from randomSeed, new for each micro-batch."""
    torch.manual_seed(0)
    host = nn.functional.dropout(X, 0.5)
    draws = []
    for _ in range(2):
        executor = dropping(7)
        draws.append([executor(X), executor(X)])
        executor.destroy()
    assert torch.equal(draws[0][0], draws[1][0]) and torch.equal(draws[0][1], draws[1][1])
    assert not torch.equal(draws[0][0], draws[0][1]) and not torch.equal(draws[0][0], host)
    executor = poptorch.inferenceModel(nn.Dropout(0.5).train(), options(1, 2))
    both = executor(torch.ones(128))
    assert not torch.equal(both[:64], both[64:]) and set(both.tolist()) == {0.0, 2.0}
    executor.destroy()


def test_the_device_leaves_the_hosts_generator_alone() -> None:
    executor = dropping(1)
    executor(X)
    torch.manual_seed(5)
    first = torch.rand(2)
    torch.manual_seed(5)
    executor(X)
    assert torch.equal(torch.rand(2), first)
    executor.destroy()


def test_rng_state_can_be_kept_and_set() -> None:
    """python/_poplar_executor.py:1123-1149: [seed, *state]."""
    executor = dropping(3)
    executor(X)
    state = executor.rng_state
    assert state[0] == 3 and all(isinstance(value, int) for value in state)
    first = executor(X)
    executor.rng_state = state
    assert torch.equal(executor(X), first)
    executor.destroy()


def test_the_dropout_flag_is_baked_in() -> None:
    """poptorch/source/popart_canonicalization/DropoutOps.cpp:12-23."""
    executor = dropping(3, train=False)
    assert torch.equal(executor(X), X)
    executor.model.train()
    assert torch.equal(executor(X), X)
    executor.destroy()


def test_compile_twice_warns(caplog: pytest.LogCaptureFixture) -> None:
    """python/_poplar_executor.py:1026-1044."""
    executor = poptorch.inferenceModel(nn.Identity())
    executor.compile(X)
    executor.compile(X)
    assert any("ignored" in record.getMessage() for record in caplog.records)
    assert executor.compilationTime().total_seconds() >= 0 and executor.isCompiled()
    executor.destroy()


def test_what_needs_hardware_or_executables_says_so() -> None:
    """python/_poplar_executor.py:1046-1198: no file, no cycles in the emulator."""
    executor = poptorch.inferenceModel(nn.Identity())
    for call in (lambda: executor.save("x"), lambda: executor.loadExecutable("x"), lambda: executor.cycleCount(),
                 lambda: poptorch.load("x"), lambda: executor.compileAndExport("x", X), executor.copyNamedBuffersToDevice):
        with pytest.raises(poptorch.Error):
            call()
    executor.destroy()


def test_connection_never_only_compiles() -> None:
    """python/_poplar_executor.py:1223-1233, 1571."""
    executor = poptorch.inferenceModel(nn.Identity(), poptorch.Options().connectionType(poptorch.ConnectionType.Never))
    executor.compile(X)
    assert executor.isCompiled() and not executor.isAttachedToDevice()
    with pytest.raises(AssertionError):
        executor(X)
    with pytest.raises(AssertionError):
        executor.attachToDevice()


def test_several_processes_are_refused() -> None:
    """Gradients would not be exchanged, and each process would train a model of its own."""
    made = poptorch.Options()
    made.Distributed.configureProcessId(1, 2)
    with pytest.raises(poptorch.Error, match="2 processes"):
        poptorch.inferenceModel(nn.Identity(), made).compile(X)


def test_calls_without_gradients_and_in_inference_mode() -> None:
    """The surrounding grad mode is no part of the graph: training trains, and nothing is noted."""
    torch.manual_seed(0)
    made = Calls(lambda m, x: poptorch.identity_loss(m.layer(x).square(), "mean"))
    before = made.layer.weight.detach().clone()
    executor = poptorch.trainingModel(made)
    with torch.no_grad():
        executor(torch.ones(2, 4))
    assert executor._trace.notes == [] and not torch.equal(made.layer.weight, before)
    executor.destroy()
    with torch.inference_mode():
        twin = poptorch.inferenceModel(made)
        assert torch.equal(twin(torch.ones(2, 4)), made(torch.ones(2, 4)))
        twin.destroy()


def test_latencies_are_triples() -> None:
    """python/_poplar_executor.py:1323-1480."""
    executor = poptorch.inferenceModel(nn.Identity())
    assert executor.getLatency() == (0.0, 0.0, 0.0)
    executor(X)
    for call in (executor.getLatency, executor.getComputeLatency, executor.getHostIpuLatency, executor.getIpuHostLatency):
        least, most, mean = call()
        assert 0 <= least <= mean <= most
    assert set(executor.getPerfCounters()) == {"input", "input_complete", "output", "output_complete"}
    executor.destroy()


def test_options_of_the_wrong_type() -> None:
    """python/_poplar_executor.py:143-149."""
    with pytest.raises(poptorch.Error, match="Expected poptorch.Options"):
        poptorch.inferenceModel(nn.Identity(), {"deviceIterations": 2})


def test_tensor_names() -> None:
    """python/_poplar_executor.py:526-541."""
    executor = poptorch.trainingModel(Calls(lambda m, x: poptorch.identity_loss(m.layer(x), "mean")))
    with pytest.raises(AssertionError):
        executor.getTensorNames()
    executor.compile(torch.zeros(2, 4))
    assert {"layer.weight", "Gradient___layer.weight"} <= set(executor.getTensorNames())
    with pytest.raises(AssertionError, match="No tensor"):
        executor.getAnchoredTensor("x")
    executor.destroy()


def test_errors_carry_their_kind_and_place() -> None:
    """poptorch/source/poptorch.cpp:624-752."""
    assert issubclass(poptorch.RecoverableError, poptorch.Error) and issubclass(poptorch.UnrecoverableError, poptorch.Error)
    assert poptorch.RecoverableError("x", recovery_action="FULL_RESET").recovery_action == "FULL_RESET"
    assert poptorch.createPoptorchError("x").type == "poptorch_py_error"
    with pytest.raises(poptorch.Error) as error:
        poptorch.inferenceModel(Calls(lambda m, x: x * x.sum().item())).compile(X)
    assert error.value.type == "poptorch_cpp_error" and "test_executor.py:" in error.value.location


class Coupled(nn.Module):
    """x1 += f(x2); x2 += g(x1) for each pair; the loss is the mean square of x1 + x2."""

    def __init__(self, pairs: int, surrogate: bool) -> None:
        super().__init__()
        self.f = nn.ModuleList(nn.Linear(4, 4) for _ in range(pairs))
        self.g = nn.ModuleList(nn.Linear(4, 4) for _ in range(pairs))
        self.surrogate = surrogate

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        one = two = x
        for f, g in zip(self.f, self.g):
            one = one + torch.tanh(f(two))
            two = two + torch.tanh(g(one))
        return (one + two).square().mean()

    def forward(self, x: torch.Tensor) -> Any:
        return self.backward_in_forward(x) if self.surrogate else poptorch.identity_loss(self.plain(x), "none")

    def backward_in_forward(self, x: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """Rebuild the inputs from the outputs and form each weight's gradient with forward ops; W * grad.detach() trains W."""
        def branch(layer: nn.Linear, h: torch.Tensor) -> torch.Tensor:
            return torch.tanh(torch.func.functional_call(layer, {k: v.detach() for k, v in layer.named_parameters()}, (h,)))

        def pull(layer: nn.Linear, h: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
            inner = d * (1 - branch(layer, h).square())
            terms.extend([(layer.weight, inner.t() @ h), (layer.bias, inner.sum(0))])
            return inner @ layer.weight.detach()

        terms: List[Tuple[torch.Tensor, torch.Tensor]] = []
        one = two = x
        for f, g in zip(self.f, self.g):
            one = one + branch(f, two)
            two = two + branch(g, one)
        total = one + two
        d_one = d_two = 2 * total / total.numel()
        for f, g in reversed(list(zip(self.f, self.g))):
            two = two - branch(g, one)
            d_one = d_one + pull(g, one, d_two)
            one = one - branch(f, two)
            d_two = d_two + pull(f, two, d_one)
        surrogate = sum((weight * gradient.detach()).sum() for weight, gradient in terms)
        return total.square().mean(), poptorch.identity_loss(surrogate, "none")


def test_a_reversible_backward_inside_the_traced_step() -> None:
    """AtenHandlers.gen.cpp:144,794 honours detach: sum(W * grad.detach()) has grad as its derivative, so Adam works on it."""
    weights = []
    for surrogate in (False, True):
        torch.manual_seed(0)
        made = Coupled(3, surrogate)
        optimizer = poptorch.optim.AdamW(made.parameters(), lr=0.01, eps=1e-4, max_grad_norm=0.5, loss_scaling=8.0)
        executor = poptorch.trainingModel(made, options(3, 2), optimizer)
        generator = torch.Generator().manual_seed(1)
        for _ in range(4):
            executor(torch.randn(12, 4, generator=generator))
        weights.append(torch.cat([parameter.detach().reshape(-1) for parameter in made.parameters()]))
        executor.destroy()
    assert ((weights[0] - weights[1]).norm() / weights[0].norm()).item() < 1e-5
