"""Anchored tensors: the only way to gradients on an IPU (docs/user_guide/debugging.py:35-36)."""
from __future__ import annotations

import copy

import pytest
import torch

import ipu_lean.ipu.emulator as poptorch

from .common import Classifier, options, tokens

pytestmark = pytest.mark.pod


def test_gradients_weights_and_updates() -> None:
    """Final by default in training: the last micro-batch's gradient, loss scaling included; the weight after the update."""
    torch.manual_seed(0)
    model = Classifier()
    start = copy.deepcopy(model)
    made = options(3)
    made.anchorTensor("g", "Gradient___head.weight")
    made.anchorTensor("all", "Gradient___head.bias", output_mode=poptorch.OutputMode.All)
    made.anchorTensor("u", "UpdatedVar___head.weight")
    made.anchorTensor("w", "head.weight")
    executor = poptorch.trainingModel(model, made, poptorch.optim.SGD(model.parameters(), lr=0.1, loss_scaling=4.0))
    batch = tokens(6)
    executor(*batch)
    biases = []
    for piece in zip(*[tensor.split(2) for tensor in batch]):
        start.zero_grad()
        start(*piece)[1].backward()
        biases.append(start.head.bias.grad.clone())
    assert biases[0].norm() > 0
    assert torch.allclose(executor.getAnchoredTensor("g"), 4 * start.head.weight.grad, atol=1e-6)
    assert torch.allclose(executor.getAnchoredTensor("all"), 4 * torch.cat(biases), atol=1e-6)
    assert torch.equal(executor.getAnchoredTensor("u"), model.head.weight) and torch.equal(
        executor.getAnchoredTensor("w"), model.head.weight)
    expected = start.head.bias.detach() - 0.1 * torch.stack(biases).mean(0)
    assert torch.allclose(model.head.bias, expected, atol=1e-6)
    executor.destroy()


def test_unknown_names_are_refused_at_compile_time() -> None:
    model = Classifier()
    made = options()
    made.anchorTensor("x", "Gradient___nothing")
    with pytest.raises(poptorch.Error, match="Gradient___nothing"):
        poptorch.trainingModel(model, made).compile(*tokens(2))
