"""Does PopTorch train what Python would? The gradients of the traced graph beside those of Python's own autograd, in float64.

They differ where Python has a backward of its own: `autograd.Function`, hooks, `torch.no_grad`, a value after the marked loss.
"""
from __future__ import annotations

import copy
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import fx, nn

from .options import Options
from .structures import flatten, map_tensors
from .trace import refuse, trace


def gradient_gaps(model: nn.Module, args: Tuple[Any, ...], kwargs: Optional[Dict[str, Any]] = None,
                  options: Optional[Options] = None, loss_of: Callable[[Any], torch.Tensor] = lambda result: flatten(result)[-1],
                  seed: int = 0) -> Dict[str, float]:
    """For each trainable parameter |python - traced| / |python| (norms; the absolute norm where python's is 0).

    Args:
        model: in the mode it is trained in. It is copied: its parameters are drawn anew (zeros would hide a difference).
        args, kwargs: one micro-batch. options: for the placement; a default pipeline otherwise.
        loss_of: picks the loss out of what `forward` returns in Python.
    Raises: Error when the model does not compile.
    """
    kwargs = kwargs or {}
    twin = copy.deepcopy(model).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    traced = trace(twin, args, kwargs, options or Options(), True)
    refuse([violation for violation in traced.violations if violation.rule in ("op", "loss")])
    tensors = dict(twin.named_parameters())
    trainable = [name for name in traced.parameters if tensors[name].requires_grad]
    double = map_tensors((args, kwargs), _double)
    buffers = {name: value.clone() for name, value in twin.named_buffers()}
    torch.manual_seed(seed)
    python = loss_of(twin(*double[0], **double[1]))
    expected = torch.autograd.grad(python, [tensors[name] for name in trainable], allow_unused=True)
    torch.manual_seed(seed)
    compiled = _in_double(traced.compiled())
    loss, _ = compiled(*[tensors[name] for name in traced.parameters], *[buffers[name] for name in traced.buffers],
                       *flatten(map_tensors((args, kwargs), _double)))
    found = torch.autograd.grad(loss, [tensors[name] for name in trainable], allow_unused=True)
    return {name: _gap(one, other) for name, one, other in zip(trainable, expected, found)}


def _double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double() if tensor.is_floating_point() else tensor.detach().clone()


def _in_double(module: fx.GraphModule) -> fx.GraphModule:
    """The graph's own float32 (constants, factories, casts) as float64."""
    for node in module.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, lambda item: torch.float64 if item is torch.float32 else item)
        node.kwargs = fx.node.map_aggregate(node.kwargs, lambda item: torch.float64 if item is torch.float32 else item)
    module.recompile()
    return module.double()


def _gap(expected: Optional[torch.Tensor], found: Optional[torch.Tensor]) -> float:
    if expected is None and found is None:
        return 0.0
    one = torch.zeros_like(found) if expected is None else expected  # type: ignore[arg-type]
    other = torch.zeros_like(one) if found is None else found
    norm = one.norm().item()
    gap = (one - other).norm().item()
    return gap / norm if norm else gap
