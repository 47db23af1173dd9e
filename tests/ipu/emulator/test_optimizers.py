"""Optimizers: PopART's equations, per-group values, what may change after compilation (docs/user_guide/overview.rst)."""
from __future__ import annotations

import copy
import functools
import math
from typing import Any, Callable, Dict, List

import pytest
import torch
from torch import nn

import ipu_lean.ipu.emulator as poptorch

from .common import Calls, Classifier, gap, options, plain_steps, tokens

pytestmark = pytest.mark.pod
X = torch.linspace(-1, 1, 12).reshape(3, 4)


def model() -> Calls:
    torch.manual_seed(0)
    return Calls(lambda m, x: poptorch.identity_loss(torch.tanh(m.layer(x)).square(), "mean"))


def trajectory(optimizer: Callable[..., Any], steps: int = 5) -> List[torch.Tensor]:
    """The layer's weight after each update on the device."""
    made = model()
    executor = poptorch.trainingModel(made, optimizer=optimizer(made.parameters()))
    found = []
    for _ in range(steps):
        executor(X)
        found.append(made.layer.weight.detach().double().clone())
    executor.destroy()
    return found


def written_out(update: Callable[..., torch.Tensor], steps: int = 5) -> List[torch.Tensor]:
    """The same in float64 with an update rule written out: update(w, gradient, slots, t) -> new w."""
    made = copy.deepcopy(model()).double()
    slots: Dict[str, Dict[str, Any]] = {"weight": {}, "bias": {}}
    found = []
    for t in range(1, steps + 1):
        made.zero_grad()
        torch.tanh(made.layer(X.double())).square().mean().backward()
        assert made.layer.weight.grad.norm() > 0
        with torch.no_grad():
            for name, parameter in made.layer.named_parameters():
                parameter.copy_(update(parameter, parameter.grad, slots[name], t))
        found.append(made.layer.weight.detach().clone())
    return found


def assert_close(found: List[torch.Tensor], expected: List[torch.Tensor], tolerance: float = 2e-6) -> None:
    for one, other in zip(found, expected):
        assert ((one - other).norm() / other.norm()).item() < tolerance


def adam(w: torch.Tensor, g: torch.Tensor, s: Dict[str, Any], t: int, lr: float, b1: float, b2: float, eps: float, l2: float,
         wd: float) -> torch.Tensor:
    """popart include/popart/adam.hpp: both moments corrected, eps outside the root; L2 in the gradient or decay in the update."""
    g = g + l2 * w
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
    return w - lr * (s["m"] / (1 - b1 ** t) / ((s["v"] / (1 - b2 ** t)) ** 0.5 + eps) + wd * w)


def test_adam_is_l2_and_adamw_is_decoupled() -> None:
    """CompilerImpl.cpp:874-897; tests/optimizers_test.py:1027-1088."""
    values = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
    common = {"lr": 0.01, "b1": 0.8, "b2": 0.95, "eps": 1e-6}
    l2 = written_out(functools.partial(adam, **common, l2=0.3, wd=0.0))
    decoupled = written_out(functools.partial(adam, **common, l2=0.0, wd=0.3))
    assert_close(trajectory(lambda p: poptorch.optim.Adam(p, **values)), l2)
    assert_close(trajectory(lambda p: poptorch.optim.AdamW(p, **values)), decoupled)
    assert_close(trajectory(lambda p: torch.optim.Adam(p, **values)), l2)
    assert_close(trajectory(lambda p: torch.optim.AdamW(p, **values)), decoupled)
    assert (l2[-1] - decoupled[-1]).norm() > 1e-3


def test_adamw_without_bias_correction_is_corrected_all_the_same() -> None:
    """CompilerImpl.cpp:868-884: no mode is set for ADAMW_NO_BIAS; a warning says so."""
    values = {"lr": 0.01, "weight_decay": 0.3}
    corrected = trajectory(lambda p: poptorch.optim.AdamW(p, **values))
    assert_close(trajectory(lambda p: poptorch.optim.AdamW(p, bias_correction=False, **values)), corrected, 1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd(nesterov: bool) -> None:
    """popart include/popart/sgd.hpp: g += wd w; v = momentum v + (1 - dampening) g; w -= lr v."""
    def update(w: torch.Tensor, g: torch.Tensor, s: Dict[str, Any], t: int) -> torch.Tensor:
        g = g + 0.2 * w
        s["v"] = 0.9 * s.get("v", 0) + g
        return w - 0.1 * (g + 0.9 * s["v"] if nesterov else s["v"])

    values = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2, "nesterov": nesterov}
    assert_close(trajectory(lambda p: poptorch.optim.SGD(p, **values)), written_out(update))


def test_sgd_dampens_the_first_step_too() -> None:
    """popart include/popart/sgd.hpp; torch takes the first gradient undampened."""
    def update(w: torch.Tensor, g: torch.Tensor, s: Dict[str, Any], t: int) -> torch.Tensor:
        s["v"] = 0.9 * s.get("v", 0) + 0.5 * g
        return w - 0.1 * s["v"]

    assert_close(trajectory(lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5)), written_out(update))


@pytest.mark.parametrize(("centered", "tf", "momentum"), [(False, False, 0.0), (True, False, 0.9), (False, True, 0.9)])
def test_rmsprop(centered: bool, tf: bool, momentum: float) -> None:
    """popart include/popart/adaptive.hpp; the TensorFlow variant has eps inside the root and starts at one."""
    def update(w: torch.Tensor, g: torch.Tensor, s: Dict[str, Any], t: int) -> torch.Tensor:
        g = g + 0.1 * w
        s["s"] = 0.9 * s.get("s", 1.0 if tf else 0.0) + 0.1 * g * g
        s["a"] = 0.9 * s.get("a", 0) + 0.1 * g
        variance = s["s"] - s["a"] ** 2 if centered else s["s"]
        step = g / ((variance + 1e-3) ** 0.5 if tf else variance ** 0.5 + 1e-3)
        s["v"] = momentum * s.get("v", 0) + step
        return w - 0.01 * (s["v"] if momentum else step)

    assert_close(trajectory(lambda p: poptorch.optim.RMSprop(p, lr=0.01, alpha=0.9, eps=1e-3, weight_decay=0.1, momentum=momentum,
                                                      centered=centered, use_tf_variant=tf)), written_out(update), 1e-5)


@pytest.mark.parametrize("corrected", [True, False])
def test_lamb(corrected: bool) -> None:
    """You et al. 2020, algorithm 2, with |w| clipped at max_weight_norm; on the host `step` does the same."""
    def update(w: torch.Tensor, g: torch.Tensor, s: Dict[str, Any], t: int) -> torch.Tensor:
        s["m"], s["v"] = 0.9 * s.get("m", 0) + 0.1 * g, 0.99 * s.get("v", 0) + 0.01 * g * g
        one, two = (1 - 0.9 ** t, 1 - 0.99 ** t) if corrected else (1.0, 1.0)
        step = s["m"] / one / ((s["v"] / two) ** 0.5 + 1e-6) + 0.1 * w
        return w - 0.02 * min(w.norm().item(), 0.5) / step.norm() * step

    values = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "max_weight_norm": 0.5,
              "bias_correction": corrected}
    assert_close(trajectory(lambda p: poptorch.optim.LAMB(p, **values)), written_out(update), 1e-5)
    made = model()
    optimizer = poptorch.optim.LAMB(made.parameters(), **values)
    for _ in range(5):
        optimizer.zero_grad()
        made(X).backward()
        optimizer.step()
    assert_close([made.layer.weight.detach().double()], [written_out(update)[-1]], 1e-5)


@pytest.mark.parametrize("l2", [0.0, 0.3])
def test_clipping_is_global_and_after_adams_l2(l2: float) -> None:
    """popart patterns/adamdecompose.cpp:272-279: factor c / max(c, norm) over all weights; Adam adds wd * w first."""
    torch.manual_seed(0)
    made = model()
    start = copy.deepcopy(made).double()
    executor = poptorch.trainingModel(made, optimizer=poptorch.optim.Adam(
        made.parameters(), lr=0.01, eps=1.0, weight_decay=l2, max_grad_norm=0.01, loss_scaling=64.0))
    executor(X)
    start(X.double()).backward()
    gradients = [p.grad + l2 * p.detach() for p in start.parameters()]
    norm = math.sqrt(sum(g.square().sum().item() for g in gradients))
    assert norm > 0.01
    g = gradients[0] * 0.01 / norm
    expected = start.layer.weight.detach() - 0.01 * g / (g.abs() + 1.0)
    assert torch.allclose(made.layer.weight.double(), expected, atol=1e-7)
    executor.destroy()


def test_loss_scaling_changes_nothing_in_float32() -> None:
    """docs/user_guide/overview.rst:753-757."""
    plain = trajectory(lambda p: poptorch.optim.AdamW(p, lr=0.01))
    assert_close(trajectory(lambda p: poptorch.optim.AdamW(p, lr=0.01, loss_scaling=1024.0)), plain, 1e-7)


def test_the_default_optimizer() -> None:
    """python/_poplar_executor.py:162-163: SGD with lr 0.01."""
    made = model()
    executor = poptorch.trainingModel(made)
    executor(X)
    assert_close([made.layer.weight.detach().double()], written_out(lambda w, g, s, t: w - 0.01 * g, 1))
    executor.destroy()


def test_per_group_values_as_mup_makes_them() -> None:
    """mup/optim.py:38-70: groups by width with lr / width and weight_decay * width, and an empty last group."""
    torch.manual_seed(0)
    made = Classifier()
    plain = copy.deepcopy(made)

    def groups(m: nn.Module) -> List[Dict[str, Any]]:
        matrices = [p for p in m.parameters() if p.dim() == 2]
        vectors = [p for p in m.parameters() if p.dim() == 1]
        return [{"params": matrices, "lr": 0.005, "weight_decay": 0.2}, {"params": vectors, "lr": 0.01, "weight_decay": 0.1},
                {"params": []}]

    executor = poptorch.trainingModel(made, options(2, 2), poptorch.optim.AdamW(groups(made), lr=0.01, weight_decay=0.1))
    optimizer = torch.optim.AdamW(groups(plain), lr=0.01, weight_decay=0.1)
    for step in range(3):
        batch = tokens(8, seed=step)
        executor(*batch)
        list(plain_steps(plain, optimizer, batch, 2, 2))
    assert gap(made, plain) < 1e-5
    executor.destroy()
