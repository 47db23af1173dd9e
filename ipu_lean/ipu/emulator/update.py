"""One weight update on the device: gradients put together over micro-batches, clipped, and PopART's optimizer applied."""
from __future__ import annotations

from typing import Any, Dict, List

import torch

from . import enums, optimdevice
from .half import round_half
from .optimconvert import Converted, Kind
from .options import Options

State = Dict[str, Dict[str, Any]]


class Accumulator:
    """Gradients of the micro-batches of one update.

    float32 gradients add up where autograd puts them. float16 ones are moved after each micro-batch into an accumulator of the
    optimizer's `accum_type`; a float16 accumulator holds the running mean, since a sum would overflow (MeanReductionStrategy).
    `apart` asks for each micro-batch's gradients as they are.
    """

    def __init__(self, parameters: Dict[str, torch.Tensor], trainable: List[str], optimizer: Converted, options: Options,
                 apart: bool = False) -> None:
        self._parameters = {name: parameters[name] for name in trainable}
        self._narrow = optimizer.attributes.get("accum_type") == torch.float16
        self._moved = apart or self._narrow or any(p.dtype == torch.float16 for p in self._parameters.values())
        self._mean = options.Training.accumulation_and_replication_reduction_type == enums.ReductionType.Mean
        self._running = self._narrow and self._mean
        self._held: Dict[str, torch.Tensor] = {}
        self._count = 0
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def collect(self) -> Dict[str, torch.Tensor]:
        """Take in one micro-batch's gradients, and return them if they are kept apart."""
        self._count += 1
        seen: Dict[str, torch.Tensor] = {}
        if not self._moved:
            return seen
        for name, parameter in self._parameters.items():
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                seen[name] = gradient
                self._held[name] = self._add(self._held.get(name), gradient)
        return seen

    def _add(self, held: Any, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.float().clone() if gradient.dtype == torch.float32 else gradient.float()
        if held is not None:
            share = 1.0 / self._count if self._running else 1.0
            total = held.float() * (1.0 - share if self._running else 1.0) + total * share
        return round_half(total) if self._narrow else total

    @torch.no_grad()
    def result(self, scale: float) -> Dict[str, torch.Tensor]:
        """Mean or sum over the micro-batches, in float32, with the loss scaling taken out."""
        divisor = scale * (self._count if self._mean and not self._running else 1)
        found = {}
        for name, parameter in self._parameters.items():
            gradient = self._held[name].float() if name in self._held else parameter.grad
            parameter.grad = None
            if gradient is not None:
                found[name] = gradient if divisor == 1 else gradient.div_(divisor)
        return found


@torch.no_grad()
def apply(parameters: Dict[str, torch.Tensor], gradients: Dict[str, torch.Tensor], state: State, optimizer: Converted,
          values: Dict[str, Dict[str, Any]]) -> None:
    """Clip and step. `values` holds each parameter's own lr, betas, …; gradients are float32 and are used up."""
    if optimizer.kind == Kind.ADAM:  # L2: before clipping (popart:patterns/adamdecompose.cpp:272-279)
        for name, gradient in gradients.items():
            if values[name]["weight_decay"]:
                gradient.add_(parameters[name].float(), alpha=values[name]["weight_decay"])
    limit = optimizer.attributes.get("max_grad_norm", float("inf"))
    if limit != float("inf") and gradients:
        optimdevice.clip(gradients, limit)
    types = slot_types(optimizer)
    for name, gradient in gradients.items():
        weight, slots = parameters[name], state[name]
        wide = weight.float() if weight.dtype == torch.float16 else weight
        for slot, dtype in types.items():
            if dtype == torch.float16 and slot in slots:
                slots[slot] = slots[slot].float()
        _one(wide, gradient, slots, values[name], optimizer)
        for slot, dtype in types.items():
            if dtype == torch.float16 and slot in slots:
                slots[slot] = round_half(slots[slot])
        if wide is not weight:
            weight.copy_(round_half(wide))


def _one(weight: torch.Tensor, gradient: torch.Tensor, slots: Dict[str, Any], group: Dict[str, Any],
         optimizer: Converted) -> None:
    kind = optimizer.kind
    if kind in (Kind.ADAM, Kind.ADAMW, Kind.ADAMW_NO_BIAS):
        optimdevice.adam_update(weight, gradient, slots, group, decoupled=kind != Kind.ADAM)
    elif kind in (Kind.LAMB, Kind.LAMB_NO_BIAS):
        optimdevice.lamb_update(weight, gradient, slots, group, kind == Kind.LAMB)
    elif kind in (Kind.SGD1, Kind.SGD2):
        optimdevice.sgd_update(weight, gradient, slots, group)
    else:
        tf = optimizer.attributes["use_tf_variant"]
        optimdevice.rmsprop_update(weight, gradient, slots, group, kind == Kind.RMSPROP_CENTERED, tf)


def slot_types(optimizer: Converted) -> Dict[str, torch.dtype]:
    """The type that each slot is stored in."""
    attributes = optimizer.attributes
    if "velocity_accum_type" in attributes:
        return {"Accl1___": attributes["velocity_accum_type"]}
    return {"Accl1___": attributes["first_order_momentum_accum_type"],
            "Accl2___": attributes["second_order_momentum_accum_type"]}
