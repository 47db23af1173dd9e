"""What tests of Reformers share: a small one in which nothing is zero, and its gradients."""

from __future__ import annotations

import torch

from tests.models.common import tiny

LAYERS = {
    "attention": ["local", "lsh"], "local": {"chunk": 4}, "lsh": {"chunk": 4, "hashes": 4}, "positions": "axial", "seq": 32,
    "tied": False, "attention_bias": False, "readout_bias": True, "stack": {"output": "concat"}, "depth": 4,
}  # fmt: skip


def reformer(dtype=torch.float64, **changes):
    """A small Reformer in which nothing is zero."""
    return tiny(**{**LAYERS, **changes}).to(dtype)


def gradients(model, tokens, labels, seed=0, **given):
    """Loss and gradients by name."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    loss, _ = model.loss(model.hidden(tokens, **given), labels)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst(found, truth):
    """The largest relative difference of a tensor; none of the truth is zero."""
    assert set(found) == set(truth)
    assert all(value.norm() > 0 for value in truth.values())
    return max(float((found[name] - value).norm() / value.norm()) for name, value in truth.items())
