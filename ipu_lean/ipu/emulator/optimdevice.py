"""The optimizers as PopART computes them (popart include/popart/{adam,sgd,adaptive}.hpp), on the device's weights.

`state` holds a parameter's slots under PopART's names: Accl1___ (first moment or velocity), Accl2___ (second), Accl3___, Step___.
All functions work in place and without autograd; `group` holds the plain values of the group's attributes.
"""
from __future__ import annotations

import math
from typing import Any, Dict

import torch

State = Dict[str, Any]
Group = Dict[str, Any]


def _slot(state: State, name: str, like: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
    if name not in state:
        state[name] = torch.full_like(like, fill)
    return state[name]


def _moments(gradient: torch.Tensor, state: State, group: Group) -> Any:
    """m = b1 m + (1 - b1) g, v = b2 v + (1 - b2) g^2; both and the step that this is, from 1."""
    beta1, beta2 = group["betas"]
    first, second = _slot(state, "Accl1___", gradient), _slot(state, "Accl2___", gradient)
    state["Step___"] = state.get("Step___", 0) + 1
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    return first, second, state["Step___"]


def adam_update(weight: torch.Tensor, gradient: torch.Tensor, state: State, group: Group, decoupled: bool) -> None:
    """w -= lr * (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) [+ wd * w]).

    With L2 regularisation (`decoupled` False) the caller has added wd * w to the gradient.
    """
    first, second, step = _moments(gradient, state, group)
    beta1, beta2 = group["betas"]
    denominator = (second.sqrt() / math.sqrt(1 - beta2 ** step)).add_(group["eps"])
    if decoupled:
        weight.mul_(1 - group["lr"] * group["weight_decay"])
    weight.addcdiv_(first, denominator, value=-group["lr"] / (1 - beta1 ** step))


def lamb_update(weight: torch.Tensor, gradient: torch.Tensor, state: State, group: Group, bias_correction: bool = True) -> None:
    """Adam's direction plus wd * w, scaled by min(|w|, max_weight_norm) / |direction| (1 when either is 0)."""
    first, second, step = _moments(gradient, state, group)
    beta1, beta2 = group["betas"]
    one, two = (1 - beta1 ** step, 1 - beta2 ** step) if bias_correction else (1.0, 1.0)
    direction = (first / one) / ((second / two).sqrt() + group["eps"]) + group["weight_decay"] * weight
    size, length = weight.norm().clamp(max=group["max_weight_norm"]), direction.norm()
    trust = torch.where((size > 0) & (length > 0), size / length, torch.ones_like(size))
    weight.sub_(direction * (group["lr"] * trust))


def sgd_update(weight: torch.Tensor, gradient: torch.Tensor, state: State, group: Group) -> None:
    """g += wd * w; v = momentum * v + (1 - dampening) * g; w -= lr * v, with Nesterov w -= lr * (g + momentum * v).

    Unlike torch's, the first velocity is dampened as well.
    """
    momentum = group["momentum"]
    if group["weight_decay"]:
        gradient = gradient.add(weight, alpha=group["weight_decay"])
    if momentum or group["dampening"]:
        velocity = _slot(state, "Accl1___", gradient)
        velocity.mul_(momentum).add_(gradient, alpha=1 - group["dampening"])
        gradient = gradient.add(velocity, alpha=momentum) if group["nesterov"] else velocity
    weight.add_(gradient, alpha=-group["lr"])


def rmsprop_update(weight: torch.Tensor, gradient: torch.Tensor, state: State, group: Group, centered: bool, tf: bool) -> None:
    """s = alpha s + (1 - alpha) g^2 [minus the squared mean of g]; w -= lr * (momentum's sum of) g / (sqrt(s) + eps).

    The TensorFlow variant has sqrt(s + eps) and starts s at one.
    """
    square = _slot(state, "Accl1___", gradient, 1.0 if tf else 0.0)
    if group["weight_decay"]:
        gradient = gradient.add(weight, alpha=group["weight_decay"])
    square.mul_(group["alpha"]).addcmul_(gradient, gradient, value=1 - group["alpha"])
    variance = square
    if centered:
        mean = _slot(state, "Accl2___", gradient)
        mean.lerp_(gradient, 1 - group["alpha"])
        variance = square.addcmul(mean, mean, value=-1)
    denominator = variance.add(group["eps"]).sqrt_() if tf else variance.sqrt().add_(group["eps"])
    if group["momentum"]:
        velocity = _slot(state, "Accl3___", gradient)
        velocity.mul_(group["momentum"]).addcdiv_(gradient, denominator)
        weight.add_(velocity, alpha=-group["lr"])
    else:
        weight.addcdiv_(gradient, denominator, value=-group["lr"])


def clip(gradients: Dict[str, torch.Tensor], limit: float) -> torch.Tensor:
    """Scale all gradients in place by c / max(c, norm), norm over all of them together; returns the norm."""
    norm = torch.stack([gradient.float().norm() for gradient in gradients.values()]).norm()
    factor = limit / norm.clamp(min=limit)
    for gradient in gradients.values():
        gradient.mul_(factor.to(gradient.dtype))
    return norm


