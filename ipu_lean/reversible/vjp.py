"""Backward passes as graphs of forward operations, for compilers that ignore Python's backward code.

`derive` runs `torch.func.vjp` of a function once, on shapes, and keeps the operations as a graph: the function's value and, from
cotangents, the gradients. Operations that the device lacks are replaced by plainer ones (decompositions.py) until none is left.
A graph is evaluated in two parts, so that what a cotangent depends on may itself depend on the value.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, fx

from . import decompositions

aten = torch.ops.aten
Tensors = Tuple[Tensor, ...]
Function = Callable[[Tensors, Tensors], Tuple[Tensors, Tensors]]
Allowed = Callable[[fx.Node], bool]
_META = torch.device("meta")
_SAME = (aten.alias.default, aten.detach.default)
_ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
_EMPTY = tuple(getattr(aten, name).default for name in ("empty_permuted", "empty_strided") if hasattr(aten, name))
_EMPTY += (aten.empty.memory_format,)
_ATTEMPTS = 12


class Underivable(Exception):
    """The backward pass needs operations that the device lacks, or draws random numbers; `ops` names them."""

    def __init__(self, ops: Sequence[str], reason: str) -> None:
        self.ops, self.reason = list(ops), reason
        super().__init__(f"{reason}: {', '.join(self.ops)}")


def any_op(node: fx.Node) -> bool:
    """Every operation is allowed."""
    return True


class Pullback:
    """A function's value and its vector-Jacobian product, as one graph of forward operations.

    Args:
        graph: placeholders are primals, constants and cotangents; the output is values, extras and gradients, flat.
        counts, results: how many of each: (primals, constants, cotangents), (values, extras).
        outputs: the values' shapes and types, as tensors on `meta`.
    """

    def __init__(self, graph: fx.Graph, counts: Tuple[int, int, int], results: Tuple[int, int], outputs: Tensors) -> None:
        self.graph, self.counts, self.results, self.outputs = graph, counts, results, outputs
        nodes = list(graph.nodes)
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        flat = list(nodes[-1].args[0])
        count = sum(results)
        self.values = flat[:count]
        self.gradients = [None if _is_zero(node) else node for node in flat[count:]]
        ahead = _ancestors(self.values)
        calls = [node for node in nodes if node.op == "call_function"]
        self.first = [node for node in calls if node in ahead]
        self.second = [node for node in calls if node not in ahead]

    def ops(self) -> List[str]:
        """Names of the operations, such as `aten::mm`, each once."""
        return sorted({op_name(node) for node in (*self.first, *self.second) if _is_op(node)})

    def begin(self, primals: Sequence[Tensor], constants: Sequence[Tensor] = (), pull: bool = True) -> Evaluation:
        """Compute the value. `pull`: gradients will be asked for, so what they need of the first part is kept."""
        return Evaluation(self, (*primals, *constants), pull)

    def gradients_at(self, primals: Sequence[Tensor], cotangents: Sequence[Tensor]) -> List[Optional[Tensor]]:
        """What `begin` and `pull` give, without the value itself; for a function without constants."""
        return Evaluation(self, primals, True, value=False).pull(*cotangents)


class Evaluation:
    """One evaluation of a `Pullback`: `values` and `extras` are there at once, gradients follow from `pull`."""

    def __init__(self, derived: Pullback, given: Sequence[Tensor], pull: bool, value: bool = True) -> None:
        self._derived = derived
        self._env: Dict[fx.Node, Any] = dict(zip(derived.inputs, given))
        self._device = given[0].device
        kept = (derived.values if value else []) + (derived.second if pull else [])
        wanted = None if value else _ancestors(derived.gradients)
        self._run([node for node in derived.first if wanted is None or node in wanted], kept)
        found = [self._env.get(node) for node in derived.values]
        count = derived.results[0]
        self.values: Tensors = tuple(found[:count])
        self.extras: Tensors = tuple(found[count:])
        self.decisions: Tensors = ()  # module_vjp.py

    def pull(self, *cotangents: Tensor) -> List[Optional[Tensor]]:
        """Gradients with respect to each primal, from one cotangent for each value; None for one that is zero by its form.

        Once only: it gives up what it held.
        """
        derived = self._derived
        self._env.update(zip(derived.inputs[sum(derived.counts[:2]) :], cotangents))
        self._run(derived.second, [node for node in derived.gradients if node is not None])
        env, self._env = self._env, {}
        return [None if node is None else env[node] for node in derived.gradients]

    def _run(self, nodes: Sequence[fx.Node], kept: Sequence[fx.Node]) -> None:
        """Run nodes in order and let go of each result after its last use, unless a kept node is or reads it."""
        env = self._env
        last: Dict[fx.Node, int] = {}
        for place, node in enumerate(nodes):
            for source in node.all_input_nodes:
                last[source] = place
        needed = set(kept)
        for node in kept:
            needed.update(node.all_input_nodes)
        ends: Dict[int, List[fx.Node]] = {}
        for node, place in last.items():
            if node not in needed:
                ends.setdefault(place, []).append(node)
        for place, node in enumerate(nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: env[source])
            env[node] = node.target(*args, **self._placed(kwargs))  # type: ignore[operator]
            for gone in ends.get(place, ()):
                env.pop(gone, None)

    def _placed(self, kwargs: Dict[str, Any]) -> Dict[str, Any]:
        """Tensors are made where the inputs are, not where the graph was derived."""
        return {**kwargs, "device": self._device} if kwargs.get("device") is not None else kwargs


def derive(
    function: Function,
    primals: Sequence[Tensor],
    constants: Sequence[Tensor] = (),
    allowed: Allowed = any_op,
    pull: bool = True,
) -> Pullback:
    """The graph of `function(primals, constants) -> (values, extras)` and of its vector-Jacobian product.

    Args:
        primals: floating tensors that gradients are wanted for; only shapes and types are read.
        constants: other tensors (integers, masks, buffers). values, extras: tuples of tensors; extras get no cotangent.
        allowed: whether the device has the operation of a graph's node. Operations on nothing but constants made in the
            function are not asked about: a compiler computes them beforehand.
        pull: False for the function alone, without gradients.
    Raises:
        Underivable: an operation is left that is not allowed and that torch cannot decompose, or is random.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # takes a second to load, and most programs derive nothing

    primals, constants = tuple(_shape_of(t) for t in primals), tuple(_shape_of(t) for t in constants)
    values, extras = function(primals, constants)
    outputs = tuple(_shape_of(t) for t in values)
    cotangents = outputs if pull else ()
    counts, results = (len(primals), len(constants), len(cotangents)), (len(values), len(extras))

    def flat(*tensors: Tensor) -> Tuple[Any, ...]:
        inner = tensors[counts[0] : counts[0] + counts[1]]
        if not pull:
            out, more = function(tensors[: counts[0]], inner)
            return (*out, *more)
        out, back, more = torch.func.vjp(lambda *own: function(own, inner), *tensors[: counts[0]], has_aux=True)
        return (*out, *more, *back(tuple(tensors[sum(counts[:2]) :])))

    rules, lacking = dict(decompositions.BASIC), []
    for _ in range(_ATTEMPTS):
        with torch.enable_grad():  # what a function computes may depend on it
            graph = _pruned(make_fx(flat, decomposition_table=rules)(*primals, *constants, *cotangents).graph)
        missing = {node.target: op_name(node) for node in _foreign(graph, allowed)}
        if not missing:
            _refuse_random(graph)
            return Pullback(graph, counts, results, outputs)
        if all(name.startswith("aten::") for name in missing.values()):
            lacking = sorted(set(missing.values()))
        fresh = {target: decompositions.rule_for(target) for target in missing if target not in rules}
        fresh = {target: rule for target, rule in fresh.items() if rule is not None}
        if not fresh:
            raise Underivable(lacking, f"the {'back' if pull else 'for'}ward pass needs operations that the device does not have")
        rules.update(fresh)
    raise AssertionError("decompositions do not come to an end")


def op_name(node: fx.Node) -> str:
    """`aten::mm`."""
    return node.target._schema.name  # type: ignore[union-attr]


def _is_op(node: fx.Node) -> bool:
    """An operation of torch, not an input or the picking of one of several results."""
    return node.op == "call_function" and hasattr(node.target, "_schema")


def _is_zero(node: Optional[fx.Node]) -> bool:
    """No gradient, or one that `torch.func` made up of zeros because the value does not depend on the primal."""
    return node is None or (_is_op(node) and node.target in _ZEROS)


def _shape_of(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=_META)


def _ancestors(nodes: Sequence[Optional[fx.Node]]) -> Set[fx.Node]:
    found: Set[fx.Node] = set()
    waiting: List[fx.Node] = [node for node in nodes if node is not None]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _foreign(graph: fx.Graph, allowed: Allowed) -> List[fx.Node]:
    """Calls that are not allowed. What is computed from nothing but literals is left to the host."""
    literal: Set[fx.Node] = set()
    found = []
    for node in graph.nodes:
        if not _is_op(node):
            continue
        if all(source in literal for source in node.all_input_nodes) and not _is_random(node):
            literal.add(node)
        elif not op_name(node).startswith("aten::") or not allowed(node):
            found.append(node)
    return found


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in node.target.tags  # type: ignore[union-attr]


def _refuse_random(graph: fx.Graph) -> None:
    drawn = sorted({op_name(node) for node in graph.nodes if _is_op(node) and _is_random(node)})
    if drawn:
        raise Underivable(drawn, "random numbers would be drawn anew in the second evaluation")


def _pruned(graph: fx.Graph) -> fx.Graph:
    """Without operations that do nothing here, without dead ones, without writes in place; views may take any strides."""
    for node in list(graph.nodes):
        if not _is_op(node):
            continue
        if node.target in _SAME:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.target in (aten.view.default, aten._unsafe_view.default):
            node.target = aten.reshape.default
        else:
            node.kwargs = {key: value for key, value in node.kwargs.items() if key not in ("layout", "pin_memory")}
            _out_of_place(node)
            _filled(node)
    graph.eliminate_dead_code()
    return graph


def _out_of_place(node: fx.Node) -> None:
    """Turn `op_(x, …)` into `op(x, …)`, whose result later readers of x read in its place."""
    schema = node.target._schema  # type: ignore[union-attr]
    if not schema.name.endswith("_") or not schema.arguments[0].alias_info or not schema.arguments[0].alias_info.is_write:
        return
    base = node.args[0]
    packet = getattr(aten, schema.name.split("::")[1][:-1], None)
    node.target = getattr(packet, schema.overload_name or "default")
    later = False
    for user in list(node.graph.nodes):
        if later and base in user.all_input_nodes:
            user.replace_input_with(base, node)
        later = later or user is node


def _filled(node: fx.Node) -> None:
    """Turn `fill(empty, value)` into one factory."""
    if node.target is not aten.fill.Scalar:
        return
    base, value = node.args
    if base.target is aten.empty_like.default:
        node.target, node.args = aten.full_like.default, (base.args[0], value)
    elif base.target in _EMPTY:
        node.target, node.args = aten.full.default, (base.args[0], value)
        node.kwargs = {key: base.kwargs[key] for key in ("dtype", "device") if key in base.kwargs}
