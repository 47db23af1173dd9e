"""What a model does before training: attention scores with queries that are not zero, the readout's multiplier, weight decay."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ipu_lean.mup.figures import Signature
from ipu_lean.nn.attention.blockwise import MASKED
from ipu_lean.sweep.coord.rig import Rig

DRAWS = 8
_SOFTMAX = (torch.softmax, torch.Tensor.softmax, F.softmax)


@torch.no_grad()
def signature_of(model: nn.Module, inputs: torch.Tensor, size: int, seed: int) -> Signature:
    """Measures `model`, whose weights are drawn anew in part (pass one that nothing else needs)."""
    generator = torch.Generator().manual_seed(seed + 1)
    scores, head_size = _scores(model, inputs, generator)
    readout, fan_in = _readout(model, generator)
    return Signature(size, seed, scores, head_size, readout, fan_in)


def _scores(model: nn.Module, inputs: torch.Tensor, generator: torch.Generator) -> Any:
    """({attention: rms of its scores}, head size), for inputs drawn from normal(0, 1) as a norm puts them out: hidden states of a
    text share a direction, and their few scores say little. Queries and keys are drawn `DRAWS` times with the standard deviation
    that they have (queries that start at zero: a hidden matrix's), because one narrow draw is far from the mean of all.
    """
    layers = {name: module for name, module in model.named_modules() if _projections(module) and hasattr(module, "head_size")}
    if not layers:
        return {}, None
    model.set_attention("explicit")  # type: ignore[operator]
    found = {}
    for name, layer in layers.items():
        matrices = [tensor for part in _projections(layer) for tensor in part.parameters() if tensor.dim() == 2]
        stds = [float(tensor.square().mean().sqrt()) or tensor.shape[1] ** -0.5 for tensor in matrices]
        listener = _Softmax()
        for _ in range(DRAWS):
            for tensor, std in zip(matrices, stds):
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
            given = torch.randn((2, _length(layer, inputs.shape[1]), matrices[0].shape[1]), generator=generator).to(matrices[0])
            with listener:
                layer(given)
        if listener.found:
            found[name] = (sum(value**2 for value in listener.found) / len(listener.found)) ** 0.5
    return found, next(iter(layers.values())).head_size


def _projections(module: nn.Module) -> List[nn.Module]:
    """What queries and keys are made by: two matrices, or one that they share in hashed attention; [] for other modules."""
    if hasattr(module, "query_key"):
        return [module.query_key]
    return [module.query, module.key] if hasattr(module, "query") and hasattr(module, "key") else []


def _length(layer: nn.Module, seq: int) -> int:
    """At most 32 tokens, in whole chunks where attention is cut into chunks."""
    length, chunk = min(seq, 32), int(getattr(layer, "chunk", 1))
    return length if length <= chunk else length - length % chunk


class _Softmax(TorchFunctionMode):
    """Notes what every softmax over keys is given, as attention computes it: no formula of ours in between. One over another
    dimension joins rounds of hashing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: List[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Optional[Dict[str, Any]] = None) -> Any:
        dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim")
        if func in _SOFTMAX and dim in (-1, args[0].dim() - 1):
            scores = args[0].detach().double()
            self.found.append(float(scores[scores > MASKED / 2].square().mean().sqrt()))
        return func(*args, **(kwargs or {}))


def _readout(model: nn.Module, generator: torch.Generator) -> Any:
    """(rms of the readout's output for normal inputs and weights, its fan-in): sqrt(fan-in) times whatever it multiplies with."""
    head = [block.module for block in model.blocks() if block.kind == "head"][-1]  # type: ignore[operator]
    readout = getattr(head, "projection", head)  # a classifier's has a dense layer before it
    tensors = readout.tensors() if hasattr(readout, "tensors") else list(readout.parameters())
    matrices = [tensor for tensor in tensors if tensor.dim() == 2]
    if not matrices:
        return None, None
    fan_in = matrices[0].shape[1]
    squares = []
    for _ in range(DRAWS):
        for tensor in tensors:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) if tensor.dim() == 2 else torch.zeros(tensor.shape))
        given = torch.randn((64, fan_in), generator=generator).to(matrices[0])
        squares.append(float(readout(given).double().square().mean()))
    return (sum(squares) / DRAWS) ** 0.5, fan_in


def decay_of(rig: Rig, model: nn.Module) -> Dict[str, float]:
    """Share of every tensor that one update takes off when its gradient is zero; tensors that are zero are left out."""
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = rig.optimizer(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rig.advance(optimizer, 0)
    optimizer.step()
    found = {}
    for name, parameter in model.named_parameters():
        size = float(before[name].double().norm())
        if size:
            found[name] = float((parameter.detach().double() - before[name].double()).norm()) / size
        with torch.no_grad():
            parameter.copy_(before[name])
        parameter.grad = None
    return found
