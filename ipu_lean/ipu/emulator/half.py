"""float16 as an IPU computes it: each op in float32 on float16 values, its result rounded once, to nearest or stochastically.

The same holds backwards: a gradient that leaves an op towards a float16 tensor is rounded, and so is the sum of the gradients of
a tensor with several readers. Products have float32 partial sums here; products.py has float16 ones. Numbers beyond 65504 become
infinite.
"""
from __future__ import annotations

import contextlib
import operator
from typing import Any, Callable, Dict, Iterator, Optional, Sequence, Set, Tuple

import torch
from torch import fx

from .lossscale import watch
from .structures import map_tensors

WATCHED = frozenset({"mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "convolution"})
"""Ops whose float16 gradients automatic loss scaling looks at."""

_SMALLEST_NORMAL, _SUBNORMAL_STEP = 2.0 ** -14, 2.0 ** -24
_FRACTION = 1 << 13
_stochastic = [False]


@contextlib.contextmanager
def rounding(stochastic: bool) -> Iterator[None]:
    """How results are rounded inside the block (Options.Precision.enableStochasticRounding)."""
    _stochastic.append(stochastic)
    try:
        yield
    finally:
        _stochastic.pop()


def round_half(x: torch.Tensor) -> torch.Tensor:
    """float32 -> float16, to nearest even, or up or down with the probability that keeps the mean.

    A float16 that arrives as float32 is returned unchanged either way.
    """
    if not _stochastic[-1]:
        return x.half()
    x = x.detach().contiguous()
    if x.dim() == 0:
        return round_half(x.reshape(1)).reshape(())
    noise = _noise(x)
    rounded = x.view(torch.int32).add(noise).bitwise_and_(-_FRACTION).view(torch.float32)  # infinities stay as they are
    small = (x.abs() < _SMALLEST_NORMAL).nonzero(as_tuple=True)  # few: their spacing no longer shrinks with them
    if small[0].numel():
        steps = x[small] / _SUBNORMAL_STEP + noise[small].float() / _FRACTION
        rounded[small] = torch.floor(steps) * _SUBNORMAL_STEP
    return rounded.half()


def _noise(x: torch.Tensor) -> torch.Tensor:
    """Random integers below 2^13, shaped as `x`: float32 has that many fraction bits more. Four come out of one 64-bit draw."""
    count = x.numel()
    drawn = torch.empty((count + 3) // 4, dtype=torch.int64).random_()
    return drawn.view(torch.int16)[:count].bitwise_and_(_FRACTION - 1).view(x.shape)


class _ToHalf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return round_half(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.float()


class _ToFloat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, watched: bool) -> torch.Tensor:
        ctx.watched = watched
        return x.float()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Tuple[torch.Tensor, None]:
        rounded = round_half(gradient)
        if ctx.watched:
            watch(rounded)
        return rounded, None


class _Fork(torch.autograd.Function):
    """One output for each reader; the sum of their gradients is rounded after each addition."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, readers: int) -> Tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for _ in range(readers))

    @staticmethod
    def backward(ctx: Any, *gradients: Optional[torch.Tensor]) -> Tuple[Optional[torch.Tensor], None]:
        total: Optional[torch.Tensor] = None
        for gradient in gradients:
            if gradient is not None:
                total = gradient if total is None else round_half(total.float() + gradient.float())
        return total, None


def fork(x: torch.Tensor, readers: int) -> Tuple[torch.Tensor, ...]:
    """A float16 tensor of the graph that several ops read."""
    return _Fork.apply(x, readers)


def to_half(x: torch.Tensor, **_: Any) -> torch.Tensor:
    """A conversion to float16 in the graph."""
    return _ToHalf.apply(x)


def to_float(x: torch.Tensor, **_: Any) -> torch.Tensor:
    """A conversion from float16 to float32 in the graph."""
    return _ToFloat.apply(x, False)


def add_half(x: torch.Tensor, y: torch.Tensor, by: float = 1, times: float = 1) -> torch.Tensor:
    """`by * x + times * y`, rounded once; float16 if both are."""
    total = _widen(x) * by + _widen(y) * times
    return to_half(total) if x.dtype == y.dtype == torch.float16 else total


class HalfOp:
    """An op of the graph with float16 among its inputs or results.

    Args:
        target: the op. dtypes: the traced type of each result. mutated: positions of arguments that it writes into.
        watched: automatic loss scaling looks at the gradients that it hands on.
    """

    def __init__(self, target: Callable[..., Any], dtypes: Sequence[Optional[torch.dtype]], mutated: Sequence[int],
                 watched: bool = False) -> None:
        self.target, self.dtypes, self.mutated, self.watched = target, tuple(dtypes), tuple(mutated), watched
        self.__name__ = self.__qualname__ = "half_" + getattr(target, "__name__", "op").replace(".", "_")
        self.__module__ = __name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def widen(tensor: torch.Tensor) -> torch.Tensor:
            return _widen(tensor, self.watched)

        wide = map_tensors(tuple(_types(item) for item in args), widen)
        result = self.target(*wide, **map_tensors({key: _types(value) for key, value in kwargs.items()}, widen))
        for position in self.mutated:
            if args[position].dtype == torch.float16:
                args[position].copy_(to_half(wide[position]))
        if self.mutated and isinstance(result, torch.Tensor):
            return args[self.mutated[0]]
        types = iter(self.dtypes)
        return map_tensors(result, lambda tensor: _narrow(tensor, next(types)))


def _widen(tensor: torch.Tensor, watched: bool = False) -> torch.Tensor:
    return _ToFloat.apply(tensor, watched) if tensor.dtype == torch.float16 else tensor


def _narrow(tensor: torch.Tensor, dtype: Optional[torch.dtype]) -> torch.Tensor:
    return to_half(tensor) if dtype == torch.float16 and tensor.dtype == torch.float32 else tensor


def _types(item: Any) -> Any:
    return torch.float32 if item is torch.float16 else item


def wrap(target: Callable[..., Any], name: str, args: Tuple[Any, ...], kwargs: Dict[str, Any], meta: Dict[str, Any],
         inputs: Sequence[Any]) -> Callable[..., Any]:
    """The callable to replay for a node: `target` itself unless float16 takes part. `inputs` are the nodes it reads."""
    dtypes = meta.get("dtypes", ())
    read = [node.meta.get("dtype") for node in inputs]
    if torch.float16 not in (*dtypes, *read) or not inputs:
        return target
    writes = meta.get("mutates", set())
    shared = any(node.meta.get("groups", set()) & meta.get("groups", set()) for node in inputs)
    if shared and not writes:
        return target  # a view: the bits stay where they are
    if name == "_to_copy":
        if read[0] == dtypes[0]:
            return target
        return to_half if dtypes[0] == torch.float16 and read[0] == torch.float32 else (
            to_float if dtypes[0] == torch.float32 else target)
    groups = [getattr(item, "meta", {}).get("groups", set()) for item in args]
    positions = [index for index, group in enumerate(groups) if group & writes]
    return HalfOp(target, dtypes, positions, name in WATCHED)


def rounded_forks(graph: fx.Graph) -> None:
    """Give every reader of a float16 value an output of its own, so that the sum of their gradients is rounded as a sum on the
    device is. Storages that are written in place are left alone."""
    written: Set[int] = set()
    for node in graph.nodes:
        written |= node.meta.get("mutates", set())
    for node in list(graph.nodes):
        readers = [user for user in node.users if user.op == "call_function"]
        uses = sum(_uses(reader, node) for reader in readers)
        if node.meta.get("dtype") != torch.float16 or node.meta.get("groups", set()) & written or uses < 2:
            continue
        place = node
        while place.op == "placeholder" and place.next.op == "placeholder":
            place = place.next
        with graph.inserting_after(place):
            made = graph.call_function(fork, (node, uses))
        numbers = iter(range(uses))
        for reader in readers:
            with graph.inserting_before(reader):
                reader.args, reader.kwargs = fx.node.map_arg(
                    (reader.args, reader.kwargs), lambda source: _own(graph, source, node, made, numbers))  # noqa: B023


def _own(graph: fx.Graph, source: fx.Node, node: fx.Node, made: fx.Node, numbers: Iterator[int]) -> fx.Node:
    """The next output of the fork `made` in place of `node`; other sources stay."""
    if source is not node:
        return source
    taken = graph.call_function(operator.getitem, (made, next(numbers)))
    taken.meta = dict(node.meta)
    return taken


def _uses(reader: fx.Node, node: fx.Node) -> int:
    """How often `node` stands among the arguments of `reader`."""
    found = []
    fx.node.map_arg((reader.args, reader.kwargs), lambda source: found.append(source) or source)
    return sum(source is node for source in found)
