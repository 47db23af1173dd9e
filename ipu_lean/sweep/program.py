"""The gradient of many models of one shape as one program: `vmap` over stacked weights, traced once, replayed operation by
operation.

A small model's step is mostly Python and dispatch. `torch.func.vmap` runs K models in one pass, so that this cost is paid once;
tracing the pass (`make_fx`) takes away what the transforms themselves cost, and what no one reads of its results.
"""

from __future__ import annotations

import time
from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from ipu_lean.config import Config, MemoryConfig

Tensors = Dict[str, torch.Tensor]


def plain_config(config: Config) -> Config:
    """`config` with every activation stored and nothing compiled. What is kept for the backward pass never changes the numbers,
    and what recomputes it are Python autograd functions, which transforms cannot enter."""
    train = config.train.model_copy(update={"compile": "none"})
    return config.model_copy(update={"memory": MemoryConfig(engine="store"), "train": train})


class StackedGradient:
    """(weights, buffers, inputs, labels) of K models -> (losses, gradients).

    Every tensor is an argument, so one program serves all models that agree in shapes and in their forward pass's plain numbers.

    Args:
        step: the training step of one model; its own tensors are not read.
        weights: by the step's names, `[K, *shape]`.
        shared, own: buffers that all models have in common, and those that differ (`[K, *shape]`).
        inputs, labels: an example of one micro-batch, `[K, rows, ...]`.

    Attributes:
        seconds: what tracing took.
    """

    def __init__(
        self, step: nn.Module, weights: Tensors, shared: Tensors, own: Tensors, inputs: torch.Tensor, labels: torch.Tensor
    ) -> None:
        started = time.perf_counter()
        names, count = [*weights, *shared, *own], len(weights)
        places = (0, [None] * len(shared) + [0] * len(own), 0, 0)

        def loss(one: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional_call(step, dict(zip(names, [*one, *buffers])), (x, y))[0]

        def all_of_them(*flat: torch.Tensor) -> Tuple[Any, ...]:
            one, buffers, (x, y) = list(flat[:count]), list(flat[count:-2]), flat[-2:]
            grads, losses = vmap(grad_and_value(loss), in_dims=places)(one, buffers, x, y)
            return (losses, *grads)

        with torch.no_grad():
            traced = make_fx(all_of_them)(*weights.values(), *shared.values(), *own.values(), inputs, labels)
        _without_idle_views(traced.graph)
        traced.graph.eliminate_dead_code()
        traced.recompile()
        self.run = traced.forward
        self.seconds = time.perf_counter() - started

    @torch.no_grad()
    def __call__(
        self, weights: Tensors, shared: Tensors, own: Tensors, inputs: torch.Tensor, labels: torch.Tensor
    ) -> Tuple[torch.Tensor, List[torch.Tensor]]:
        """Losses `[K]` and gradients in the order of the weights, each `[K, *shape]`; arguments as at tracing."""
        losses, *grads = self.run(*weights.values(), *shared.values(), *own.values(), inputs, labels)
        return losses, grads


def _without_idle_views(graph: Graph) -> None:
    """Take out views to the shape that is there already: vmap's rules leave some 200 in a GPT of two layers, and dispatching them
    is 8 % of a step of 16 small models."""
    views = {getattr(torch.ops.aten, name).default for name in ("view", "_unsafe_view", "expand")}
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in views and _shape(node) == _shape(node.args[0]):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _shape(node: Node) -> Tuple[int, ...]:
    return tuple(node.meta["tensor_meta"].shape)
