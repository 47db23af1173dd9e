"""What tests of LSH and local attention share: a module in which nothing is zero, some padding, gradients."""

from __future__ import annotations

import torch

from ipu_lean.nn import LSHSelfAttention


def make(width=16, heads=2, head_size=None, *, seq=64, chunk=8, implementation="explicit", **options):
    torch.manual_seed(1)
    module = LSHSelfAttention(width, heads, head_size, seq=seq, chunk=chunk, implementation=implementation, **options).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=1.5 * width**-0.5)
    return module


def some_present(batch, seq, generator=None):
    """Absent tokens at the end of the first sequence and at the start of the others."""
    present = torch.ones(batch, seq, dtype=torch.bool)
    present[0, -seq // 5 :] = False
    present[1:, : seq // 7] = False
    return present


def gradients(y, inputs, seed=5):
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(y.dtype)
    return torch.autograd.grad(y, inputs, weights)


def close(ours, theirs, tolerance):
    scale = max(1.0, float(theirs.detach().abs().max()))
    return float((ours - theirs).detach().abs().max()) <= tolerance * scale


def assert_transformed_alike(module, x):
    """torch.func.vmap over the batch and torch.func.grad of one row give what plain calls give."""
    parameters = dict(module.named_parameters())

    def call(parameters, row):
        return torch.func.functional_call(module, parameters, (row[None],))[0]

    assert close(torch.func.vmap(call, (None, 0))(parameters, x), module(x), 1e-12)
    found = torch.func.grad(lambda parameters: call(parameters, x[0]).square().sum())(parameters)
    wanted = torch.autograd.grad(module(x[:1]).square().sum(), list(parameters.values()))
    for (name, gradient), other in zip(found.items(), wanted):
        assert close(gradient, other, 1e-11), name
