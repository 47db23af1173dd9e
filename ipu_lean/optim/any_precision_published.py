"""The update rule of torchdistx's AnyPrecisionAdamW (0.3.0.dev0), operation by operation, for comparison with published runs.

Its order of roundings, defects included: weight decay multiplies the weight in its own type (a no-op in bf16 below
lr x weight_decay = 0.002), moments take two roundings each, and a bf16 variance does not decay at beta2 = 0.999.
"""
from __future__ import annotations

from typing import Any, Dict, MutableMapping

import torch

from ipu_lean.optim.any_precision_options import state_kinds


def update_group(group: Dict[str, Any], state_of: MutableMapping[torch.Tensor, Any]) -> None:
    """One update of every parameter of `group` that has a gradient."""
    for parameter in group["params"]:
        if parameter.grad is not None:
            update(parameter, parameter.grad, group, state_of[parameter])


def update(p: torch.Tensor, grad: torch.Tensor, group: Dict[str, Any], state: Dict[str, Any]) -> None:
    """One update of one parameter, in place."""
    if not state:
        state["step"] = torch.tensor(0.0)
        for key, kind in state_kinds(group, p.dtype).items():
            state[key] = torch.zeros_like(p, dtype=kind)
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    state["step"] += 1
    step, m, v = state["step"], state["exp_avg"], state["exp_avg_sq"]
    grad = -grad if group["maximize"] else grad
    if group["weight_decay"]:
        p.mul_(1 - lr * group["weight_decay"])
    m.mul_(beta1).add_(grad, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    # `step` is a float32 tensor, and so are the corrections: that is part of the published numbers.
    size = lr / (1 - beta1**step)
    denominator = (v.sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"], alpha=1)
    if not group["use_kahan_summation"]:
        p.addcdiv_(m, denominator, value=-size)
        return
    compensation = state["compensation"]
    compensation.addcdiv_(m, denominator, value=-size)
    before = p.clone()
    p.add_(compensation)
    compensation.add_(before.sub_(p))
