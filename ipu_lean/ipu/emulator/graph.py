"""Passes over a recorded graph: which nodes live, which is the loss, which are constants; then the callable that is replayed."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import fx

from . import half, kernels, products
from .oprules import argument

aten = torch.ops.aten
# Ops whose index or target torch wants in 64 bit; the device has 32.
_LONG_ARGUMENTS = {"gather": ("index",), "scatter": ("index",), "scatter_add": ("index",), "scatter_reduce": ("index",),
                   "index_select": ("index",), "take_along_dim": ("indices",), "index_add": ("index",), "index_copy": ("index",)}
_WRAPPING = frozenset({"add", "sub", "mul", "sum", "cumsum", "pow", "rsub", "prod", "cumprod"})


def live_nodes(graph: fx.Graph, outputs: Sequence[fx.Node]) -> Set[fx.Node]:
    """What the outputs need, plus what writes into a variable (LowerToPopartFactories.cpp: dead code goes first).

    An op that writes into a storage lives if a later living op uses that storage.
    """
    variables: Set[int] = set()
    for node in graph.nodes:
        if node.meta.get("kind") in ("parameter", "buffer"):
            variables |= node.meta["groups"]
    live: Set[fx.Node] = set(outputs)
    groups: Set[int] = set(variables)
    for node in outputs:
        groups |= node.meta.get("groups", set())
    for node in reversed(list(graph.nodes)):
        if node not in live and not (node.meta.get("mutates", set()) & groups):
            continue
        live.add(node)
        for source in node.all_input_nodes:
            live.add(source)
            groups |= source.meta.get("groups", set())
    return live


def final_losses(graph: fx.Graph, live: Set[fx.Node]) -> Tuple[List[fx.Node], int]:
    """The marked nodes that feed no other marked node, and how many are marked (RemoveSurplusIdentityLosses.cpp)."""
    feeds_loss: Set[fx.Node] = set()
    final, count = [], 0
    for node in reversed(list(graph.nodes)):
        if node not in live:
            continue
        users = [user for user in node.users if user in live]
        inside = any(user in feeds_loss or user.meta.get("loss") for user in users)
        if inside:
            feeds_loss.add(node)
        if node.meta.get("loss"):
            count += 1
            if not inside:
                final.append(node)
    return final, count


def trainable_nodes(graph: fx.Graph, trainable: Set[str]) -> Set[fx.Node]:
    """Nodes through which a gradient flows: reachable from a trainable parameter without a detach, and of a float type."""
    found: Set[fx.Node] = set()
    for node in graph.nodes:
        meta = node.meta
        starts = meta.get("kind") == "parameter" and meta["name"] in trainable
        passes = meta.get("op") != "aten::detach" and ("dtype" not in meta or meta["dtype"].is_floating_point)
        if starts or (passes and any(source in found for source in node.all_input_nodes)):
            found.add(node)
    return found


def fold_constants(graph: fx.Graph, live: Set[fx.Node], constants: Dict[str, torch.Tensor]) -> Dict[fx.Node, torch.Tensor]:
    """Evaluate on the host, once, every op whose inputs are all constants (popart_canonicalization, EvaluateConstexprs).

    Left alone are storages that a non-constant op writes into, or that are read before their last write.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    last_write: Dict[int, int] = {}
    unsafe: Set[int] = set()
    for node in graph.nodes:
        for group in node.meta.get("mutates", set()):
            last_write[group] = order[node]
            if not node.meta["constant"]:
                unsafe.add(group)
    for node in graph.nodes:
        if node in live and node.meta.get("constant"):
            readers = [order[user] for user in node.users if user in live and not user.meta.get("constant")]
            unsafe |= {group for group in node.meta.get("groups", ()) for at in readers if at < last_write.get(group, -1)}
    values: Dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in graph.nodes:
            if node not in live or not node.meta.get("constant") or node.meta.get("groups", set()) & unsafe:
                continue
            if node.op == "get_attr":
                values[node] = constants[node.target].clone()
            elif all(source in values for source in node.all_input_nodes):
                function, args, kwargs = node.target, *fx.node.map_arg((node.args, node.kwargs), lambda source: values[source])
                values[node] = function(*args, **kwargs)
    return {node: value for node, value in values.items() if isinstance(value, torch.Tensor)}


def build(graph: fx.Graph, live: Set[fx.Node], outputs: Sequence[fx.Node], loss: Optional[fx.Node],
          constants: Dict[str, torch.Tensor], half_partials: bool = False) -> fx.GraphModule:
    """The graph that is replayed: `f(*variables and inputs) -> (loss or None, outputs)`, with the device's differences.

    Args:
        half_partials: partial sums of float16 products are float16. Error for products of which that is not emulated.
    """
    folded = fold_constants(graph, live, constants)
    root: Dict[str, torch.Tensor] = {}
    result = fx.Graph()
    twin: Dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            twin[node] = result.placeholder(node.name)
        elif node not in live:
            continue
        elif node in folded:
            if any(user in live and user not in folded for user in node.users) or node in outputs:
                root[node.name] = folded[node]
                twin[node] = result.get_attr(node.name)
        elif node.op == "get_attr":
            root[node.target] = constants[node.target]
            twin[node] = result.get_attr(node.target)
            if any(node.meta["groups"] & other.meta.get("mutates", set()) for other in live):
                twin[node] = result.call_function(aten.clone.default, (twin[node],), {})  # each run starts from the constant
        else:
            twin[node] = _copy(result, node, twin, half_partials)
        if node in twin:
            twin[node].meta = dict(node.meta)
    inner = set() if loss is None else {node for node in outputs if node.meta.get("loss") and node is not loss}
    returned = [result.call_function(aten.reshape.default, (twin[node], [-1]), {}) if node in inner else twin[node]
                for node in outputs]  # a reduced loss that feeds another has shape (1,) (RemoveSurplusIdentityLosses.cpp:71-89)
    result.output((None if loss is None else twin[loss], returned))
    if loss is not None:
        half.rounded_forks(result)
    module = fx.GraphModule(root, result)
    for name, value in root.items():
        setattr(module, name, value)
    return module


def _copy(result: fx.Graph, node: fx.Node, twin: Dict[fx.Node, fx.Node], half_partials: bool) -> fx.Node:
    """One call, rewritten where the device computes something else than torch."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: twin[source])
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    base = node.meta["op"].split("::")[-1].rstrip("_")
    if base == "gelu":
        kwargs = dict(kwargs, approximate="tanh")  # both forms lower to one op (ActivationOps.cpp:146-161)
    elif base in ("nll_loss_forward", "nll_loss2d_forward"):
        reduction, ignore = (argument(target, args, kwargs, name) for name in ("reduction", "ignore_index"))
        target, args, kwargs = kernels.nll_loss, (args[0], args[1], reduction, ignore), {}
    elif base == "index_put":
        args, kwargs = args[:3], {}  # accumulate is ignored (IndexOps.cpp:228-306)
        args = (args[0], [index if index is None else _long(result, index) for index in args[1]], args[2])
    elif node.meta["op"] == "aten::cumsum" and not node.meta["dtype"].is_floating_point:
        target, args, kwargs = kernels.cumsum, (*args, kwargs.get("dtype"))[:3], {}
    elif base == "index":
        args = (args[0], [index if index is None else _long(result, index) for index in args[1]])
    elif base in _LONG_ARGUMENTS and hasattr(target, "_schema"):
        args, kwargs = _with_long(result, target, args, kwargs, _LONG_ARGUMENTS[base])
    plain, target = target, half.wrap(target, base, args, kwargs, node.meta, node.all_input_nodes)
    if half_partials and target is not plain:
        target = products.wrap(target, base, node.meta)
    made = result.call_function(target, args, kwargs)
    if base in _WRAPPING and node.meta.get("dtype") is torch.int64 and not node.meta.get("mutates"):
        made.meta = dict(node.meta)
        made = result.call_function(kernels.wrap_int32, (made,), {})
    return made


def _long(result: fx.Graph, index: fx.Node) -> fx.Node:
    if index.meta.get("dtype") in (torch.int32, torch.int16, torch.int8):
        made = result.call_function(aten._to_copy.default, (index,), {"dtype": torch.int64})
        made.meta = dict(index.meta, dtype=torch.int64)
        return made
    return index


def _with_long(result: fx.Graph, target: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any], names: Sequence[str]) -> Any:
    for position, entry in enumerate(target._schema.arguments):
        if entry.name in names:
            if position < len(args):
                args = (*args[:position], _long(result, args[position]), *args[position + 1:])
            elif entry.name in kwargs:
                kwargs = dict(kwargs, **{entry.name: _long(result, kwargs[entry.name])})
    return args, kwargs
