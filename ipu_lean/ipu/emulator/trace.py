"""Trace a model once: fresh shape-only parameters, one call of `forward`, every op recorded and checked."""
from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Set, Tuple

import torch
from torch import fx, nn

from . import checks, graph, tracestate
from .errors import Error, createPoptorchError
from .intercept import FunctionMode, factories_on_device, fresh_copy
from .location import Where
from .log import logger
from .oprules import ALLOWED
from .options import Options
from .recorder import DispatchMode, Recorder
from .structures import flatten, map_tensors

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Trace(NamedTuple):
    """What one trace found.

    Attributes:
        recorder, live, outputs: the recorded graph, its living nodes, the nodes returned (None for host tensors).
        structure: what `forward` returned, with shape-only tensors.
        violations: what would stop PopTorch's compiler. notes: what it accepts and does not honour.
        parameters, buffers: names of the float variables, in the order of the graph's inputs.
    """

    recorder: Recorder
    live: Set[fx.Node]
    outputs: List[Optional[fx.Node]]
    structure: Any
    violations: List[checks.Violation]
    notes: List[Tuple[str, Where]]
    parameters: List[str]
    buffers: List[str]

    @property
    def forward_stages(self) -> int:
        """Changes of IPU in trace order, plus one."""
        return self.recorder.switches + 1

    def ops(self) -> List[Dict[str, Any]]:
        """One row for each living op: name, shape, dtype, module, file, line, ipu, stage."""
        rows = []
        for node in self.recorder.graph.nodes:
            meta = node.meta
            if node in self.live and meta.get("kind") == "op":
                rows.append({"op": meta["op"], "shape": meta.get("shape"), "dtype": meta.get("dtype"), "ipu": meta["ipu"],
                             "stage": meta["stage"], "constant": meta["constant"], **meta["where"]._asdict()})
        return rows

    def compiled(self, half_partials: bool = False) -> fx.GraphModule:
        """The graph to replay; only for a trace without violations. `half_partials`: of products of float16 tensors."""
        nodes = [node for node in self.outputs if node is not None]
        final, _ = graph.final_losses(self.recorder.graph, self.live)
        loss = final[0] if self.recorder.training else None
        return graph.build(self.recorder.graph, self.live, nodes, loss, self.recorder.constants, half_partials)

    def written(self) -> List[str]:
        """Names of variables that the graph writes in place."""
        return checks.written_variables(self.recorder.graph, self.live)

    def writes_inputs(self) -> bool:
        groups: Set[int] = set()
        for node in self.live:
            groups |= node.meta.get("mutates", set())
        return any(node.meta.get("kind") == "input" and node.meta["groups"] & groups for node in self.recorder.graph.nodes)


class _Shadow:
    """The model's tensors replaced by shape-only ones, and put back afterwards. Aliases stay aliases."""

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self.saved: List[Tuple[Dict[str, Any], str, Any]] = []
        self.expected: List[Tuple[nn.Module, str, Any]] = []
        self.parameters: List[str] = []
        self.buffers: List[str] = []
        self.trainable: Dict[str, bool] = {}
        self._twins: Dict[int, Any] = {}
        self._recorder = recorder
        self._replace(model, "_parameters")  # all parameters first: they are the graph's first inputs
        self._replace(model, "_buffers")

    def _replace(self, model: nn.Module, kind: str) -> None:
        for prefix, module in model.named_modules():
            table = module.__dict__[kind]
            for name, tensor in table.items():
                if tensor is None:
                    continue
                path = f"{prefix}.{name}" if prefix else name
                if id(tensor) not in self._twins:
                    self._twins[id(tensor)] = self._twin(path, tensor, kind == "_parameters")
                self.saved.append((table, name, tensor))
                if not isinstance(module, _BATCH_NORMS) or kind == "_parameters":
                    self.expected.append((module, name, self._twins[id(tensor)]))
        for table, name, tensor in self.saved:
            table[name] = self._twins[id(tensor)]

    def _twin(self, path: str, tensor: torch.Tensor, is_parameter: bool) -> torch.Tensor:
        plain = tensor.detach().as_subclass(torch.Tensor)
        if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
            twin = self._recorder.constant(plain)  # only float variables exist (JitDispatch.cpp:109-120)
            self._recorder.node_of(twin).meta["path"] = path
            return nn.Parameter(twin, requires_grad=False) if is_parameter else twin
        if tensor.dtype not in (torch.float16, torch.float32, torch.float64):
            raise Error(f"Unsupported tensor input type from pytorch: {tensor.dtype} ({path})")
        twin = fresh_copy(plain)
        if is_parameter:
            twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
        names = self.parameters if is_parameter else self.buffers
        names.append(path)
        self.trainable[path] = is_parameter and tensor.requires_grad
        self._recorder.placeholder("p_" + path.replace(".", "_"), twin, "parameter" if is_parameter else "buffer")
        self._recorder.node_of(twin).meta.update(name=path, trainable=self.trainable[path])
        return twin

    def restore(self) -> List[str]:
        """Put the host's tensors back; returns the names that `forward` had re-assigned (an error, _impl.py:432-451)."""
        moved = []
        for module, name, twin in self.expected:
            now = module._parameters.get(name, module._buffers.get(name))
            if now is not twin:
                moved.append(f"{type(module).__name__}.{name}")
        for table, name, tensor in reversed(self.saved):
            table[name] = tensor
        return moved


def trace(model: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any], options: Options, training: bool,
          hooks: Optional[Tuple[List[Any], List[Any]]] = None) -> Trace:
    """Call `model(*args, **kwargs)` once on shapes. The tensors in `args` and `kwargs` are micro-batches; only shapes are read.

    Raises: Error at once for what cannot be traced at all; everything else is in the result's `violations`.
    """
    before, after = hooks or ([], [])
    modules = {id(module): name for name, module in model.named_modules()}
    recorder = Recorder(modules, training, options._source_location_excludes)
    shadow = _Shadow(model, recorder)
    strategy = options._execution_strategy
    moved: List[str] = []
    tracestate.push(recorder)
    try:
        _run_all(before)
        strategy.onStartTracing()
        numbers = iter(range(10 ** 6))
        args, kwargs = map_tensors((args, kwargs), lambda tensor: _input(recorder, tensor, next(numbers)))
        with factories_on_device(recorder), FunctionMode(recorder), DispatchMode(recorder):
            result = model(*args, **kwargs)
    finally:
        strategy.onEndTracing()
        _run_all(after)
        tracestate.pop()
        moved = shadow.restore()
    if moved:
        raise createPoptorchError(f"Parameters and buffers must not be re-assigned in forward: {', '.join(moved)}. Change a "
                                  "buffer in place (.copy_, .add_)")
    return _finish(recorder, result, options, training, shadow)


def _run_all(hooks: List[Any]) -> None:
    for hook in list(hooks):
        hook()


def _input(recorder: Recorder, tensor: torch.Tensor, number: int) -> torch.Tensor:
    if tensor.dtype not in ALLOWED:
        raise Error(f"Unsupported tensor input type from pytorch: {tensor.dtype} (input {number})")
    twin = fresh_copy(tensor.contiguous())
    recorder.placeholder(f"input_{number}", twin, "input")
    return twin


def _finish(recorder: Recorder, result: Any, options: Options, training: bool, shadow: _Shadow) -> Trace:
    outputs: List[Optional[fx.Node]] = []
    for tensor in flatten(result):
        node = recorder.node_of(tensor)
        if node is None:
            logger.warning("Output expected to be on the IPU but is on %s", tensor.device.type)
        outputs.append(node)
    live = graph.live_nodes(recorder.graph, [node for node in outputs if node is not None])
    _note_counters(recorder)
    if training:
        _note_gradients(recorder, live, shadow)
        _note_after_loss(recorder, live, outputs)
    violations = checks.all_violations(recorder.graph, live, recorder.switches, options, training)
    return Trace(recorder, live, outputs, result, violations, list(recorder.notes), shadow.parameters, shadow.buffers)


def functions(recorder: Recorder, live: Set[fx.Node]) -> Dict[str, Where]:
    """Each `autograd.Function` whose ops are in the graph, by class name, and one place of it."""
    found: Dict[str, Where] = {}
    for node in recorder.graph.nodes:
        where = node.meta.get("where")
        if node in live and where is not None and where.function:
            found.setdefault(where.function, where)
    return found


def _note_counters(recorder: Recorder) -> None:
    """Integer buffers are constants of the graph (JitDispatch.cpp:109-120)."""
    nodes = list(recorder.graph.nodes)
    for node in nodes:
        if node.meta.get("path") and any(node.meta["groups"] & other.meta.get("mutates", set()) for other in nodes):
            recorder.notes.append((f"{node.meta['path']} is no float tensor, so it is a constant: what forward writes into it is "
                                   "lost", Where("", "", 0)))


def _note_after_loss(recorder: Recorder, live: Set[fx.Node], outputs: List[Optional[fx.Node]]) -> None:
    """The gradient starts at the marked node: what is computed from it and returned does not train."""
    final, _ = graph.final_losses(recorder.graph, live)
    after: Set[fx.Node] = set(final)
    for node in recorder.graph.nodes:
        if node.meta.get("op") != "aten::detach" and any(source in after for source in node.all_input_nodes):
            after.add(node)
    for node in outputs:
        if node in after and node not in final:
            recorder.notes.append(("the returned value is computed from the marked loss, but the gradient starts at the mark: "
                                   "wrap the final value in poptorch.identity_loss", node.meta["where"]))


def _note_gradients(recorder: Recorder, live: Set[fx.Node], shadow: _Shadow) -> None:
    """PopART differentiates what was traced: Python backward code and grad mode are not part of it (RequiresGrad.cpp:13-48)."""
    for name, where in functions(recorder, live).items():
        recorder.notes.append((f"the backward of autograd.Function {name} is ignored: its forward is differentiated", where))
    moving = graph.trainable_nodes(recorder.graph, {name for name in shadow.parameters if shadow.trainable[name]})
    quiet = [node for node in recorder.graph.nodes if node in live and node in moving
             and node.meta.get("no_grad") and not node.meta["where"].function]
    places = {node.meta["where"]: None for node in quiet}
    for where in places:
        recorder.notes.append(("torch.no_grad() does not stop the gradient on the IPU; use .detach()", where))


def refuse(violations: List[checks.Violation]) -> None:
    """Raise PopTorch's Error with every violation, one a line."""
    if violations:
        first: Optional[Where] = next((item.where for item in violations if item.where is not None), None)
        location = f"{first.file}:{first.line}" if first is not None else ""
        raise Error("\n".join(str(item) for item in violations), location=location)
