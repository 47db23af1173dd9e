"""How many bytes a traced training step keeps from its forward pass for its backward pass, from the recorded graph alone.

The graph is run once on shapes, at the types that were traced, with autograd on: what the derivatives of its operations save, and
what the marked loss can still reach when the forward pass is over, is what is kept. (torch's derivatives save what PopART's read:
operands of products, results of softmax and tanh, inputs of GELU. Where PopART differs in detail, so do the bytes.) Memory for
the forward pass itself follows from the order of the trace; PopART may choose a better one.
"""
from __future__ import annotations

import weakref
from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

import torch
from torch import fx

from .checks import execution_mode
from .graph import final_losses
from .oprules import run_on_shapes
from .options import Options
from .recorder import META
from .trace import Trace

_RECOMPUTING = (3, 4)  # popart::RecomputationType: Pipeline, RecomputeAll
_RESIDENT = ("parameter", "buffer", "constant")
_BY_SHAPE = ("aten::mean",)  # derivatives that read a shape, for which torch 2.0 keeps the tensor


class Kept(NamedTuple):
    """Bytes of one micro-batch; weights, buffers and constants are not counted.

    Attributes:
        activations: alive between the two passes. gradients: the same, but of tensors that are there to be multiplied by a weight
            of their own shape, by that weight's name: what a surrogate loss hands over.
        recomputed: alive on top of it while the largest stretch between two checkpoints is computed again; else 0.
        forward: most alive at once during the forward pass, without `gradients`.
        tensors: what `activations` is made of, largest first: (operation, shape, bytes).
    """

    activations: int
    gradients: Dict[str, int]
    recomputed: int
    forward: int
    tensors: List[Tuple[str, Tuple[int, ...], int]]


class _Saved:
    """A tensor that autograd keeps; it lives as long as the node that keeps it."""

    __slots__ = ("tensor", "node", "__weakref__")

    def __init__(self, tensor: torch.Tensor, node: Optional[fx.Node]) -> None:
        self.tensor, self.node = tensor, node


class _Storage(NamedTuple):
    """One piece of memory: its bytes, the node that made it, the places of its first and its last use."""

    size: int
    node: fx.Node
    first: int
    last: int


def kept_for_backward(trace: Trace, options: Optional[Options] = None) -> Kept:
    """Count for a training trace without violations.

    Args:
        options: decide what PopART recomputes: with autoRecomputation RecomputeAll or Pipeline, or in a pipeline of several IPUs,
            only checkpoints and what enters a stage are kept; otherwise everything that a derivative reads.
    """
    run = _Run(trace)
    saved = run.saved()
    if _recomputes(trace, options):
        return _with_recomputation(run, saved)
    gradients: Dict[str, int] = {}
    kept: Set[int] = set()
    for key, owner in saved.items():
        if owner is None:
            kept.add(key)
        else:
            gradients[owner] = gradients.get(owner, 0) + run.storages[key].size
    return _result(run, kept, gradients, 0)


def _recomputes(trace: Trace, options: Optional[Options]) -> bool:
    options = options or Options()
    chosen = options._popart.options.get("autoRecomputation")
    pipelined = execution_mode(options) == 0 and trace.forward_stages > 1
    return chosen in _RECOMPUTING or (chosen is None and pipelined)


def _with_recomputation(run: _Run, saved: Dict[int, Optional[str]]) -> Kept:
    """Checkpoints, and what crosses into another stage, are kept; the rest comes back one stretch at a time."""
    kept = set(run.checkpoints) | {key for key in saved if run.storages[key].node.meta.get("kind") == "input"}
    stretches: Dict[int, int] = {}
    for key in saved:
        if key not in kept:
            place = run.stretch_of(run.storages[key].first)
            stretches[place] = stretches.get(place, 0) + run.storages[key].size
    return _result(run, kept, {}, max(stretches.values(), default=0))


def _result(run: _Run, kept: Set[int], gradients: Dict[str, int], recomputed: int) -> Kept:
    storages = [run.storages[key] for key in kept]
    listed = [(s.node.meta.get("op", s.node.meta.get("kind", "")), s.node.meta.get("shape", ()), s.size) for s in storages]
    listed.sort(key=lambda row: -row[2])
    return Kept(sum(s.size for s in storages), gradients, recomputed, run.peak(kept), listed)


class _Run:
    """The living graph, run on shapes.

    Attributes:
        storages: by number, in order of appearance. checkpoints: numbers of those that are checkpointed or enter another stage.
        entering: the latter, by the stage that they enter; marked: the former, by their own.
        reads, makes: numbers by place of the graph.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.storages: Dict[int, _Storage] = {}
        self.checkpoints: Set[int] = set()
        self.borders: List[int] = []
        self.entering: Dict[int, Set[int]] = {}
        self.marked: Dict[int, Set[int]] = {}
        self.reads: Dict[int, Set[int]] = {}
        self.makes: Dict[int, Set[int]] = {}
        self._holders: List[Any] = []
        self._numbers: Dict[int, int] = {}
        self._alive: List[Any] = []
        self._gradients: Set[int] = set()
        self._env: Dict[fx.Node, Any] = {}
        self._current: Optional[fx.Node] = None
        final, _ = final_losses(trace.recorder.graph, trace.live)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            for place, node in enumerate(trace.recorder.graph.nodes):
                self._current = node
                if node.op == "placeholder" or node in trace.live:
                    self._step(place, node)
        self._loss = self._env[final[0]]
        self._env.clear()  # what only other outputs need is gone

    def saved(self) -> Dict[int, Optional[str]]:
        """Number of each storage that the loss's derivative reads -> the weight that it only serves as a gradient of, if so."""
        found: Dict[int, Optional[str]] = {}
        for reference in self._holders:
            holder = reference()
            if holder is None:
                continue
            number = self._numbers.get(_key(holder.tensor))
            if number is None or self.storages[number].node.meta.get("kind") in _RESIDENT or self._is_constant(number):
                continue
            owner = _weight_of(holder.node, holder.tensor)
            found[number] = owner if number not in found or found[number] == owner else None
        return found

    def stretch_of(self, place: int) -> int:
        """Which stretch between checkpoints a place of the graph is in."""
        return sum(border < place for border in self.borders)

    def peak(self, kept: Set[int]) -> int:
        """Most bytes alive at once if `kept` stay to the end and gradients are counted elsewhere."""
        gradients = {number for number, owner in self.saved().items() if owner is not None}
        changes: Dict[int, int] = {}
        for number, storage in self.storages.items():
            if storage.node.meta.get("kind") in _RESIDENT or self._is_constant(number) or number in gradients:
                continue
            changes[storage.first] = changes.get(storage.first, 0) + storage.size
            if number not in kept:
                changes[storage.last + 1] = changes.get(storage.last + 1, 0) - storage.size
        now = most = 0
        for place in sorted(changes):
            now += changes[place]
            most = max(most, now)
        return most

    # -- the run ---------------------------------------------------------------------------------------------------------
    def _pack(self, tensor: torch.Tensor) -> _Saved:
        holder = _Saved(tensor.detach(), self._current)  # a result would own the node that owns it
        if self._current is None or self._current.meta.get("op") not in _BY_SHAPE:
            self._holders.append(weakref.ref(holder))
        return holder

    def _step(self, place: int, node: fx.Node) -> None:
        meta = node.meta
        if node.op in ("placeholder", "get_attr"):
            value = torch.empty(meta["shape"], dtype=meta["dtype"], device=META)
            result: Any = value.requires_grad_() if meta.get("trainable") else value
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: self._env[source])
            kwargs = {key: META if isinstance(value, torch.device) else value for key, value in kwargs.items()}
            for source in node.all_input_nodes:
                self._use(self._env[source], place, node, source)
            result = run_on_shapes(node.target, args, kwargs)
        self._env[node] = result
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self._made(tensor, place, node)
        if meta.get("op") == "poptorch::recomputation_checkpoint":
            self.checkpoints.add(self._numbers[_key(result)])
            self.marked.setdefault(meta["stage"], set()).add(self._numbers[_key(result)])
            self.borders.append(place)

    def _made(self, tensor: torch.Tensor, place: int, node: fx.Node) -> None:
        key = _key(tensor)
        if key not in self._numbers:
            self._numbers[key] = len(self._alive)
            self._alive.append(tensor.untyped_storage())  # so that no other storage gets its address
            self.storages[self._numbers[key]] = _Storage(tensor.untyped_storage().nbytes(), node, place, place)
            self.makes.setdefault(place, set()).add(self._numbers[key])

    def _use(self, value: Any, place: int, node: fx.Node, source: fx.Node) -> None:
        for tensor in value if isinstance(value, (tuple, list)) else [value]:
            number = self._numbers.get(_key(tensor)) if isinstance(tensor, torch.Tensor) else None
            if number is None:
                continue
            storage = self.storages[number]
            self.storages[number] = storage._replace(last=place)
            self.reads.setdefault(place, set()).add(number)
            crossing = "stage" in source.meta and node.meta.get("kind") == "op" and source.meta["stage"] != node.meta["stage"]
            if crossing and not source.meta.get("constant"):
                self.checkpoints.add(number)
                self.entering.setdefault(node.meta["stage"], set()).add(number)

    def _is_constant(self, number: int) -> bool:
        return bool(self.storages[number].node.meta.get("constant"))


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _weight_of(node: Optional[fx.Node], tensor: torch.Tensor) -> Optional[str]:
    """The trainable weight that a saved tensor is multiplied by, element by element, in `weight * tensor`."""
    if node is None or node.meta.get("op") != "aten::mul":
        return None
    for source in node.all_input_nodes:
        if source.meta.get("kind") == "parameter" and source.meta["shape"] == tuple(tensor.shape):
            return source.meta["name"]
    return None
