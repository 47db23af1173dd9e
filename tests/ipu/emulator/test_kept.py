"""Bytes kept for the backward pass: counted by hand on small graphs, and beside what plain torch saves."""
from __future__ import annotations

from typing import Any, Callable, Dict, Set

import pytest
import torch

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.ipu.emulator.kept import Kept, kept_for_backward
from ipu_lean.ipu.emulator.trace import trace

from .common import Calls, Classifier, tokens

pytestmark = pytest.mark.pod

ROWS, WIDTH = 3, 4
ONE = ROWS * WIDTH * 4  # bytes of one activation


def kept(function: Callable[..., Any], recompute: bool = False, half: bool = False, **changes: Any) -> Kept:
    """`function(module, x [3, 4])` returns what the step returns; module.layer is a linear layer from 4 to 4."""
    model = Calls(function, WIDTH)
    if half:
        model = model.half()
    for name, flag in changes.items():
        getattr(model.layer, name).requires_grad_(flag)
    options = poptorch.Options()
    if recompute:
        options._Popart.set("autoRecomputation", 4)
    x = torch.empty(ROWS, WIDTH, dtype=torch.float16 if half else torch.float32)
    traced = trace(model, (x,), {}, options, True)
    assert traced.violations == []
    return kept_for_backward(traced, options)


def squares(h: torch.Tensor) -> torch.Tensor:
    return poptorch.identity_loss(h * h, "sum")


def test_what_the_derivatives_read() -> None:
    """The layer's input, and tanh's result, which the product reads as well; the layer's own result is let go."""
    found = kept(lambda model, x: squares(torch.tanh(model.layer(x))))
    assert found.activations == 2 * ONE and found.gradients == {} and found.recomputed == 0
    assert sorted(name for name, _, _ in found.tensors) == ["aten::tanh", "input"]


def test_a_mean_needs_no_more_than_a_shape() -> None:
    """Whatever a torch keeps for it: the layer's input, its result for the square, the means."""
    found = kept(lambda model, x: squares((model.layer(x) * model.layer(x)).mean(-1, keepdim=True)))
    assert "aten::mul" not in [name for name, _, _ in found.tensors]


def test_half_precision_takes_half() -> None:
    assert kept(lambda model, x: squares(torch.tanh(model.layer(x))), half=True).activations == ONE


def test_nothing_is_kept_for_a_frozen_weight() -> None:
    found = kept(lambda model, x: squares(model.layer(torch.exp(x))), weight=False)
    assert [name for name, _, _ in found.tensors] == ["aten::addmm"]


def test_what_only_other_outputs_need_is_not_kept() -> None:
    found = kept(lambda model, x: (squares(model.layer(x)), torch.sigmoid(torch.exp(model.layer(x)))))
    assert found.activations == 2 * ONE


def test_views_count_once() -> None:
    found = kept(lambda model, x: squares(torch.tanh(model.layer(x)).reshape(-1).reshape(WIDTH, ROWS).t()))
    assert found.activations == 2 * ONE


def test_checkpoints_are_kept_and_the_rest_comes_back() -> None:
    def step(model: Calls, x: torch.Tensor) -> torch.Tensor:
        first = poptorch.recomputationCheckpoint(torch.tanh(model.layer(torch.sigmoid(model.layer(x)))))
        return squares(torch.tanh(model.layer(first)))

    everything, recomputing = kept(step), kept(step, recompute=True)
    assert everything.activations == 4 * ONE  # x, sigmoid, first, second tanh
    assert recomputing.activations == 2 * ONE  # x and the checkpoint
    assert recomputing.recomputed == ONE  # the sigmoid, or the second tanh


def test_a_gradient_that_only_waits_for_its_weight_is_listed_apart() -> None:
    def step(model: Calls, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ model.layer.weight.detach())
        gradient = y.t() @ y
        return poptorch.identity_loss((model.layer.weight * gradient.detach()).sum(), "none")

    found = kept(step)
    assert found.activations == 0 and found.gradients == {"layer.weight": WIDTH * WIDTH * 4}


def test_the_forward_pass_lets_go_of_what_nobody_reads_any_more() -> None:
    def chain(length: int) -> Kept:
        def step(model: Calls, x: torch.Tensor) -> torch.Tensor:
            h = x
            for _ in range(length):
                h = torch.exp(h.detach())
            return squares(model.layer(h.detach()))

        return kept(step)

    assert chain(3).forward == chain(12).forward > 2 * ONE
    assert chain(12).activations == 2 * ONE


class _Holder:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_a_network_keeps_what_torch_saves() -> None:
    """The same forward pass in plain torch, its saved storages counted: inputs and integer copies of them apart."""
    torch.manual_seed(0)
    model = Classifier()
    batch = tokens(2)
    traced = trace(model, batch, {}, poptorch.Options(), True)
    found = kept_for_backward(traced)
    resident: Set[int] = {p.untyped_storage()._cdata for p in model.parameters()}
    sizes: Dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> _Holder:
        storage = tensor.untyped_storage()
        if storage._cdata not in resident and tensor.dtype.is_floating_point:
            sizes[storage._cdata] = storage.nbytes()
            alive.append(storage)
        return _Holder(tensor)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda holder: holder.tensor):
        logits, loss = model(*batch)
    assert loss.requires_grad
    integers = ("input", "aten::_to_copy", "aten::view")
    floats = sum(size for name, _, size in found.tensors if name not in integers)
    assert floats == sum(sizes.values())
