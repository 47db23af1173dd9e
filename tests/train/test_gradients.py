"""Norm and clipping against torch's own."""

from __future__ import annotations

import pytest
import torch

from ipu_lean.train import gradients

pytestmark = pytest.mark.pod


@pytest.mark.parametrize("largest", [0.5, 100.0])
def test_clipping_equals_torch(largest: float) -> None:
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in ((3, 4), (7,), (2, 2, 2))]
    unused = torch.nn.Parameter(torch.zeros(3))
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    mine = [parameter.grad.clone() for parameter in parameters]
    expected = torch.nn.utils.clip_grad_norm_(parameters + [unused], largest)
    norm = gradients.global_norm(mine, sharded=False, device=torch.device("cpu"))
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)
    gradients.scale_gradients(mine, gradients.clip_factor(float(norm), largest))
    for found, parameter in zip(mine, parameters):
        assert torch.equal(found, parameter.grad)
    assert len(gradients.gradients_of(parameters + [unused])) == 3


def test_no_gradients() -> None:
    assert float(gradients.global_norm([], sharded=False, device=torch.device("cpu"))) == 0.0
    gradients.scale_gradients([], 0.5)
