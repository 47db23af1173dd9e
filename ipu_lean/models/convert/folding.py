"""Weights as a model without multipliers needs them: muP's and CompleteP's factors multiplied in."""

from __future__ import annotations

from typing import Dict, List, Tuple

import torch

from ipu_lean.models.gpt import GPT
from ipu_lean.nn import FCLayer, PopReadout, TiedReadout
from ipu_lean.nn.linear import Linear

Tensors = Dict[str, torch.Tensor]


def folded(model: GPT, tensors: Tensors) -> Tuple[Tensors, List[str]]:
    """(the tensors of a model that computes the same with every multiplier at 1, the names of those that changed).

    A tied readout whose factor is not the embedding's gets a matrix of its own, `readout.weight`. Hashed attention takes its
    factor in the shared projection: buckets and the direction of keys stay, up to the 1e-6 that guards their length.
    """
    found, factors = dict(tensors), _factors(model)
    if isinstance(model.readout, TiedReadout):
        head = model.readout.output_mult / model.readout.width_mult
        if head != model.spec.embedding_mult:
            found["readout.weight"] = tensors["embedding.token.weight"] * head
    changed = [name for name, factor in factors.items() if factor != 1.0 and name in found]
    for name in changed:
        found[name] = tensors[name] * factors[name]
    return found, changed


def _factors(model: GPT) -> Dict[str, float]:
    """The factor of each parameter that has one; a tied readout's apart."""
    factors: Dict[str, float] = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            _both(factors, name, module.mult)
        if isinstance(module, PopReadout):
            factors[f"{name}.weight"] = module.output_mult / module.width_mult
        if hasattr(module, "score_mult"):
            _both(factors, f"{name}.query_key.linear", module.score_mult)
        elif isinstance(getattr(module, "query", None), FCLayer):
            _both(factors, f"{name}.query.linear", module.scale * module.head_size**0.5)
    for name, _ in model.embedding.named_parameters():
        factors[f"embedding.{name}"] = model.spec.embedding_mult
    return factors


def _both(factors: Dict[str, float], name: str, factor: float) -> None:
    """Note a factor for a layer's weight and bias. A product that is 1 up to rounding is 1."""
    for tensor in ("weight", "bias"):
        whole = factors.get(f"{name}.{tensor}", 1.0) * factor
        factors[f"{name}.{tensor}"] = 1.0 if abs(whole - 1.0) < 1e-12 else whole
