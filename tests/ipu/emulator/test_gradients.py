"""What is differentiated: the traced ops, and nothing that Python does backwards."""
from __future__ import annotations

import logging
from typing import Any, List

import pytest
import torch

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.ipu.emulator import verify

from .test_trace import Step, compile_step

pytestmark = pytest.mark.pod


class WrongSign(torch.autograd.Function):
    """y = 2x, whose Python backward says -7."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * -7


def test_a_python_backward_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """dispatch_tracer/README.md:25: the traced forward is differentiated, the Python backward never runs. A warning says so."""
    model, plain = Step(WrongSign.apply), Step(lambda h: h * 2)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(3, 4)
    with caplog.at_level(logging.WARNING, "poptorch"):
        executor = poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.1))
        executor(x)
    assert any("WrongSign" in record.getMessage() for record in caplog.records)
    plain(x).backward()
    expected = plain.layer.weight.detach() - 0.1 * plain.layer.weight.grad
    assert plain.layer.weight.grad.norm() > 0 and torch.allclose(model.layer.weight, expected)
    executor.destroy()


def test_gradient_gaps_find_a_backward_that_lies() -> None:
    gaps = verify.gradient_gaps(Step(WrongSign.apply), (torch.randn(3, 4),))
    assert gaps["layer.weight"] == pytest.approx(9 / 7)
    assert max(verify.gradient_gaps(Step(lambda h: torch.tanh(h) * 2), (torch.randn(3, 4),)).values()) < 1e-12


def test_detach_cuts_and_no_grad_does_not(caplog: pytest.LogCaptureFixture) -> None:
    """tests/tensor_ops_test.py:1047-1095 (detach); RequiresGrad.cpp:13-48 (grad mode is not looked at)."""
    def quiet(h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return h * 3

    x = torch.randn(3, 4)
    for middle, moves in ((lambda h: h.detach() * 3 + h * 0, False), (quiet, True)):
        model = Step(middle)
        before = model.layer.weight.detach().clone()
        with caplog.at_level(logging.WARNING, "poptorch"):
            executor = poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.1))
            executor(x)
        assert torch.equal(model.layer.weight, before) is not moves
        executor.destroy()
    assert any("no_grad" in record.getMessage() for record in caplog.records)


def test_checkpoint_and_hooks_leave_no_mark() -> None:
    """RegisterAtenOverloads.cpp:979-990: PopART makes the backward, so torch's checkpoint and gradient hooks change nothing."""
    from torch.utils.checkpoint import checkpoint

    ran: List[int] = []

    def middle(h: torch.Tensor) -> torch.Tensor:
        h = checkpoint(torch.tanh, h, use_reentrant=False)
        h.register_hook(lambda gradient: (ran.append(1), gradient * 100)[1])
        return h

    model, plain = Step(middle), Step(torch.tanh)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(3, 4)
    executor = poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.1))
    executor(x)
    plain(x).backward()
    assert torch.allclose(model.layer.weight, plain.layer.weight - 0.1 * plain.layer.weight.grad) and ran == []
    assert model.layer.weight.grad is None
    executor.destroy()


def test_autocast_does_nothing() -> None:
    """PopTorch's source has no autocast code; cast by hand."""
    seen: List[Any] = []

    def middle(h: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            seen.append((h @ h.t()).dtype)
        return h

    compile_step(middle)
    assert seen == [torch.float32]


def test_requires_grad_is_seen_while_tracing() -> None:
    """RegisterAtenOverloads.cpp:979-990: autograd's key is on while PopTorch traces."""
    seen: List[Any] = []
    compile_step(lambda h: (seen.append((h.requires_grad, torch.is_grad_enabled())), h)[1])
    assert seen == [(True, True)]


def test_in_place_on_a_trainable_parameter_is_torchs_error() -> None:
    """poptorch/source/InplaceOps.cpp:224-240 is for buffers and frozen parameters; torch refuses a leaf that takes gradients."""
    model = Step()
    model.middle = lambda h: h + model.layer.bias.add_(1.0)
    with pytest.raises(RuntimeError, match="leaf"):
        poptorch.trainingModel(model).compile(torch.randn(3, 4))
