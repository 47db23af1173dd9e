"""Which node the gradient starts at: marked losses, implicit and explicit."""
from __future__ import annotations

from typing import Any, Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ipu_lean.ipu.emulator as poptorch

from .common import Calls

pytestmark = pytest.mark.pod
X = torch.linspace(-1, 1, 12).reshape(3, 4)
Y = torch.tensor([1, 0, 3])


def weight_after(function: Callable[..., Any], *inputs: torch.Tensor) -> torch.Tensor:
    """The layer's weight after one SGD step of 1.0 on the device."""
    torch.manual_seed(0)
    model = Calls(function)
    executor = poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), lr=1.0))
    executor(*inputs)
    weight = model.layer.weight.detach().clone()
    executor.destroy()
    return weight


def weight_expected(loss: Callable[[nn.Module], torch.Tensor]) -> torch.Tensor:
    """The same with plain torch."""
    torch.manual_seed(0)
    model = Calls(loss)
    loss(model).backward()
    assert model.layer.weight.grad.norm() > 0
    return model.layer.weight.detach() - model.layer.weight.grad


P = torch.sigmoid
IMPLICIT = {
    "l1": lambda h: F.l1_loss(h, X + 3), "mse": lambda h: F.mse_loss(h, X + 3),
    "cross_entropy": lambda h: F.cross_entropy(h, Y), "nll": lambda h: F.nll_loss(F.log_softmax(h, -1), Y),
    "bce": lambda h: F.binary_cross_entropy(P(h), P(X)),
    "kl": lambda h: F.kl_div(F.log_softmax(h, -1), P(X), reduction="batchmean"),
    "poisson": lambda h: F.poisson_nll_loss(h, P(X)), "hinge": lambda h: F.hinge_embedding_loss(h, X.sign()),
    "bce_logits": lambda h: F.binary_cross_entropy_with_logits(h, P(X)), "smooth_l1": lambda h: F.smooth_l1_loss(h, X + 3),
    "soft_margin": lambda h: F.soft_margin_loss(h, X.sign()),
    "cosine": lambda h: F.cosine_embedding_loss(h, X + 3, torch.ones(3)),
    "margin_ranking": lambda h: F.margin_ranking_loss(h, X + 3, torch.ones(3, 4)),
    "triplet": lambda h: F.triplet_margin_loss(h, X + 1, X - 1),
    "ctc": lambda h: F.ctc_loss(F.log_softmax(h, -1)[:, None], Y[None, 1:2] + 1, [3], [1]),
}


def on_device(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    """The tests' host tensors become constants of the graph; PopTorch would want them as inputs or buffers."""
    names = ("X", "Y")

    def forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        saved = {name: globals()[name] for name in names}
        try:
            if poptorch.isRunningOnIpu():
                globals().update({name: value.to(x.device) for name, value in saved.items()})
            return function(module.layer(x))
        finally:
            globals().update(saved)

    return forward


@pytest.mark.parametrize("name", sorted(IMPLICIT))
def test_the_fifteen_losses_are_marked(name: str) -> None:
    """docs/user_guide/supported_ops.rst:377-395: no identity_loss is needed."""
    forward = on_device(IMPLICIT[name])
    assert torch.allclose(weight_after(forward, X), weight_expected(lambda m: forward(m, X)), atol=1e-6)


def test_huber_is_not_one_of_them() -> None:
    """tests/torch_nn_test.py:262."""
    with pytest.raises(poptorch.Error, match="huber_loss"):
        weight_after(lambda m, x: poptorch.identity_loss(F.huber_loss(m.layer(x), x), "none"), X)


def test_plain_ops_need_the_mark() -> None:
    """RemoveSurplusIdentityLosses.cpp:141."""
    with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph!"):
        weight_after(lambda m, x: m.layer(x).square().mean(), X)
    assert torch.allclose(weight_after(lambda m, x: poptorch.identity_loss(m.layer(x).square(), "mean"), X),
                          weight_expected(lambda m: m.layer(X).square().mean()))


def test_probability_targets_leave_no_mark() -> None:
    """docs/user_guide/supported_ops.rst:381-395 lists the marked losses; torch makes this one of plain ops."""
    with pytest.raises(poptorch.Error, match="Couldn't find a loss"):
        weight_after(lambda m, x: F.cross_entropy(m.layer(x), torch.softmax(x, -1)), X)


def test_class_weights_are_an_error() -> None:
    """LossOps.cpp:101,152."""
    with pytest.raises(poptorch.Error, match="class weights"):
        weight_after(lambda m, x, y: F.cross_entropy(m.layer(x), y, weight=torch.ones(4)), X, Y)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_identity_loss_reduces(reduction: str) -> None:
    """python/ops.py:1014."""
    expected = weight_expected(lambda m: getattr(m.layer(X).exp(), reduction)())
    assert torch.allclose(weight_after(lambda m, x: poptorch.identity_loss(m.layer(x).exp(), reduction), X), expected)
    assert torch.equal(poptorch.identity_loss(X, reduction), getattr(X, reduction)())
    with pytest.raises(AssertionError):
        poptorch.identity_loss(X, "max")


def test_two_independent_losses_are_an_error_and_one_that_feeds_the_other_is_not() -> None:
    """RemoveSurplusIdentityLosses.cpp:141-145."""
    def metric(m: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Any:
        h = m.layer(x)
        return poptorch.identity_loss(h.square().mean(), "none"), F.cross_entropy(h, y)

    with pytest.raises(poptorch.Error, match="Multiple independent losses"):
        weight_after(metric, X, Y)
    both = weight_after(
        lambda m, x, y: poptorch.identity_loss(F.cross_entropy(m.layer(x), y) + F.mse_loss(m.layer(x), x), "none"), X, Y)
    assert torch.allclose(both, weight_expected(lambda m: F.cross_entropy(m.layer(X), Y) + F.mse_loss(m.layer(X), X)), atol=1e-6)


def test_a_loss_that_feeds_another_has_one_dimension() -> None:
    """RemoveSurplusIdentityLosses.cpp:71-89."""
    def forward(m: nn.Module, x: torch.Tensor) -> Any:
        inner = F.mse_loss(m.layer(x), x)
        return inner, poptorch.identity_loss(inner * 2, "none")

    executor = poptorch.trainingModel(Calls(forward))
    inner, outer = executor(X)
    assert inner.shape == (1,) and outer.shape == () and torch.allclose(2 * inner[0], outer)
    executor.destroy()


def test_an_unreturned_loss_is_not_found() -> None:
    """LowerToPopartFactories.cpp:37: dead code goes before losses are looked for."""
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        poptorch.identity_loss(m.layer(x).mean(), "none")
        return m.layer(x)

    with pytest.raises(poptorch.Error, match="Couldn't find a loss"):
        weight_after(forward, X)
    with pytest.raises(poptorch.Error, match="Couldn't find a loss"):
        weight_after(lambda m, x: None, X)


def test_the_position_of_the_loss_is_free() -> None:
    """RemoveSurplusIdentityLosses.cpp:103-107: one marked node, wherever it stands among the outputs."""
    first = weight_after(lambda m, x: (poptorch.identity_loss(m.layer(x).exp(), "mean"), m.layer(x)), X)
    last = weight_after(lambda m, x: {"a": m.layer(x), "loss": poptorch.identity_loss(m.layer(x).exp(), "mean")}, X)
    assert torch.equal(first, last)


@pytest.mark.parametrize("after", [lambda loss, h: loss * 0.5, lambda loss, h: loss + h.square().sum()])
def test_what_follows_the_mark_does_not_train(after: Callable[..., torch.Tensor]) -> None:
    """RemoveSurplusIdentityLosses.cpp:103-107: the gradient starts at the marked node, not at the returned value."""
    found = weight_after(lambda m, x, y: after(F.cross_entropy(m.layer(x), y), m.layer(x)), X, Y)
    assert torch.allclose(found, weight_expected(lambda m: F.cross_entropy(m.layer(X), Y)), atol=1e-6)
    marked = weight_after(
        lambda m, x, y: poptorch.identity_loss(after(F.cross_entropy(m.layer(x), y), m.layer(x)), "none"), X, Y)
    assert torch.allclose(marked, weight_expected(lambda m: after(F.cross_entropy(m.layer(X), Y), m.layer(X))), atol=1e-5)


def test_label_smoothing_never_trains_what_it_says() -> None:
    """LossOps.cpp:141 marks the nll part only. torch 2.0 splits it with masked_select, which PopTorch refuses."""
    try:
        found = weight_after(lambda m, x, y: F.cross_entropy(m.layer(x), y, label_smoothing=0.5), X, Y)
    except poptorch.Error as error:
        assert "masked_select" in str(error)
        return
    plain = weight_expected(lambda m: F.cross_entropy(m.layer(X), Y))
    smooth = weight_expected(lambda m: F.cross_entropy(m.layer(X), Y, label_smoothing=0.5))
    assert torch.allclose(found, plain, atol=1e-6) and not torch.allclose(found, smooth, atol=1e-3)


def test_the_final_loss_is_a_scalar() -> None:
    """popart ir.cpp:3145; identity_loss "none" of a scalar is allowed."""
    with pytest.raises(poptorch.Error, match="must be a scalar"):
        weight_after(lambda m, x: poptorch.identity_loss(m.layer(x), "none"), X)
    with pytest.raises(poptorch.Error, match="must be a scalar"):
        weight_after(lambda m, x: F.mse_loss(m.layer(x), x, reduction="none"), X)


@pytest.mark.parametrize("labels", [[1, -100, 3], [-100, -100, -100]])
def test_ignored_labels(labels: Any) -> None:
    """popart popx/op/nllx.cpp:158-177: sum / max(1, counted); torch gives NaN when all are ignored."""
    y = torch.tensor(labels)
    torch.manual_seed(0)
    model = Calls(lambda m, x, t: F.cross_entropy(m.layer(x), t))
    expected = F.cross_entropy(model.layer(X), y, reduction="sum") / max(1, int((y >= 0).sum()))
    executor = poptorch.trainingModel(model)
    assert torch.allclose(executor(X, y), expected, atol=1e-6)
    assert torch.isfinite(model.layer.weight).all()
    executor.destroy()
