"""One trace: torch's dispatcher shows each ATen op of the user's `forward`, run on shape-only (meta) tensors, once.

Autograd stays on, as under PopTorch (RegisterAtenOverloads.cpp:979-990), so Python sees `requires_grad` and grad mode as usual;
what is recorded is below it, so a Python backward, a saved-tensor hook or a checkpoint leaves no mark.
"""
from __future__ import annotations

import operator
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from . import optable
from .errors import Error
from .location import Where, find
from .oprules import LOSSES, check_dtype, is_random, mutated, refused_arguments, run_on_shapes, single_precision
from .structures import flatten

aten = torch.ops.aten
CPU, META = torch.device("cpu"), torch.device("meta")


class Recorder:
    """Collects nodes. Each one's `meta` holds: where, ipu, stage, phase, groups and mutates (storages), constant, loss."""

    def __init__(self, modules: Dict[int, str], training: bool, excludes: Sequence[str] = ()) -> None:
        self.graph = fx.Graph()
        self.training = training
        self.modules = modules
        self.excludes = excludes
        self.constants: Dict[str, torch.Tensor] = {}
        self.stage, self.phase, self.ipu = 0, 0, 0
        self.last_ipu, self.switches = 0, 0
        self.paused = False
        self.detaching = False
        self.began_with_grad = torch.is_grad_enabled()
        self.notes: List[Tuple[str, Where]] = []
        self._groups: Dict[int, Tuple[Any, int]] = {}
        self._kept: List[torch.Tensor] = []

    # -- blocks ----------------------------------------------------------------------------------------------------------
    def begin_block(self, stage: int, phase: int, ipu: int) -> None:
        """A change of IPU is one more pipeline stage, counted from IPU 0 (Compiler.cpp:1253-1297, CompilerImpl.hpp:261)."""
        if ipu != self.last_ipu:
            self.switches += 1
        self.stage, self.phase, self.ipu, self.last_ipu = stage, phase, ipu, ipu

    def end_block(self) -> None:
        self.ipu = -1

    # -- tensors and nodes -----------------------------------------------------------------------------------------------
    def node_of(self, tensor: torch.Tensor) -> Optional[fx.Node]:
        """The node that made a tensor of this trace; None for tensors from elsewhere."""
        owner = getattr(tensor, "_emulated", None)
        return owner[1] if owner is not None and owner[0] is self else None

    def bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        tensor._emulated = (self, node)
        node.meta.setdefault("groups", set()).add(self.group_of(tensor))
        node.meta.setdefault("shape", tuple(tensor.shape))
        node.meta.setdefault("dtype", tensor.dtype)

    def group_of(self, tensor: torch.Tensor) -> int:
        """A number for the tensor's storage: views of one another share it."""
        storage = tensor.untyped_storage()
        entry = self._groups.setdefault(storage._cdata, (storage, len(self._groups)))
        return entry[1]

    def placeholder(self, name: str, tensor: torch.Tensor, kind: str) -> None:
        """Make a meta tensor a graph input; kind is "parameter", "buffer" or "input"."""
        node = self.graph.placeholder(name)
        node.meta.update(kind=kind, constant=False, name=name)
        self.bind(tensor, node)

    def constant(self, value: torch.Tensor) -> torch.Tensor:
        """A host tensor that the graph keeps; returns its shape-only twin."""
        value = value.detach()
        if value.dtype == torch.float64:
            value = value.float()
        check_dtype(value)
        name = f"_constant{len(self.constants)}"
        self.constants[name] = value.clone()
        node = self.graph.get_attr(name)
        node.meta.update(kind="constant", constant=True, name=name)
        twin = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=META)
        self.bind(twin, node)
        return twin

    def where(self) -> Where:
        return find(self.modules, self.excludes)

    def fail(self, message: str) -> Error:
        """An error at the user's current line, to be raised by the caller."""
        where = self.where()
        return Error(f"{message} ({where})", location=f"{where.file}:{where.line}")

    def inference_only(self, what: str) -> None:
        """Compiler.cpp:1485-1488, 1535-1538: loops, conditions and host ops cannot be differentiated."""
        if self.training:
            raise self.fail(f"poptorch.{what} is only supported in inference models")

    def note(self, message: str) -> None:
        """Something that PopTorch accepts and that does not do what it says."""
        self.notes.append((message, self.where()))

    def record(self, target: Any, args: Any, kwargs: Dict[str, Any], result: Any, *, name: str, random: bool = False,
               mutated: Sequence[torch.Tensor] = (), loss: bool = False) -> Any:
        """Add a call that was just run on shapes; its result's tensors become the node's."""
        inputs = [self.node_of(tensor) for tensor in flatten([args, kwargs])]
        node = self.graph.call_function(target, self._arguments(args), self._arguments(kwargs))
        constant = not random and all(item is not None and item.meta["constant"] for item in inputs)
        node.meta.update(kind="op", op=name, where=self.where(), ipu=self.ipu, stage=self.stage, phase=self.phase, loss=loss,
                         constant=constant, random=random, mutates={self.group_of(tensor) for tensor in mutated},
                         no_grad=self.began_with_grad and not torch.is_grad_enabled())
        for tensor in flatten(result):
            check_dtype(tensor, self)
        node.meta["dtypes"] = tuple(tensor.dtype for tensor in flatten(result))
        if isinstance(result, torch.Tensor):
            self.bind(result, node)
        elif isinstance(result, (tuple, list)):
            node.meta.update(groups=set(), loss=False)
            for index, item in enumerate(result):
                if isinstance(item, torch.Tensor):
                    self._element(node, index, item, loss and index == 0)
        return result

    def _element(self, node: fx.Node, index: int, tensor: torch.Tensor, loss: bool) -> None:
        element = self.graph.call_function(operator.getitem, (node, index), {})
        element.meta.update({key: node.meta[key] for key in ("where", "ipu", "stage", "phase", "constant")})
        element.meta.update(kind="element", op="getitem", loss=loss, random=False, mutates=set())
        self.bind(tensor, element)
        node.meta["groups"].add(self.group_of(tensor))

    def _arguments(self, structure: Any) -> Any:
        def one(item: Any) -> Any:
            if isinstance(item, torch.device):
                return CPU
            if isinstance(item, torch.Tensor):
                return self.node_of(item)
            if isinstance(item, tuple):
                return tuple(one(part) for part in item)
            if isinstance(item, list):
                return [one(part) for part in item]
            if isinstance(item, dict):
                return {key: one(part) for key, part in item.items()}
            return item

        return one(structure)

    # -- dispatch --------------------------------------------------------------------------------------------------------
    def dispatch(self, func: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        name = func._schema.name.split("::")[-1]
        if func is aten.detach.default and not self.detaching and self.node_of(args[0]) is not None:
            twin = func(*args)  # autograd's own aliases (views, saved tensors, .data), not the user's detach()
            self.bind(twin, self.node_of(args[0]))
            return twin
        tensors = flatten([args, kwargs])
        if not any(tensor.is_meta for tensor in tensors):
            return self._without_traced_inputs(func, name, args, kwargs)
        args, kwargs = self._only_traced(name, args, kwargs)
        self._refuse(func, name, args, kwargs)
        kwargs = single_precision(kwargs)
        args = tuple(torch.float32 if item is torch.float64 else item for item in args)
        result = run_on_shapes(func, args, kwargs)
        return self.record(func, args, kwargs, result, name="aten::" + name, random=is_random(func),
                           mutated=mutated(func, name, args, kwargs), loss=name in LOSSES)

    def _without_traced_inputs(self, func: Any, name: str, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Any:
        """A factory, or an op on plain host tensors (which stays on the host unless it moves them to the device)."""
        if kwargs.get("device") is None or torch.device(kwargs["device"]).type != "meta":
            return func(*args, **kwargs)
        sources = flatten([args, kwargs])
        if sources:
            host = func(*args, **dict(kwargs, device=CPU))
            return self.constant(host)
        kwargs = single_precision(kwargs)
        return self.record(func, args, kwargs, run_on_shapes(func, args, kwargs), name="aten::" + name, random=is_random(func))

    def _only_traced(self, name: str, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> Tuple[Tuple[Any, ...], Dict[str, Any]]:
        """Host tensors may be copied into the graph; any other mix of host and IPU tensors is an error."""
        if name == "copy_" and args[0].is_meta and not args[1].is_meta:
            return (args[0], self.constant(args[1]), *args[2:]), kwargs
        moved = kwargs.get("device")
        if (name == "_to_copy" and moved is not None and torch.device(moved).type != "meta") or (
                name == "copy_" and not args[0].is_meta):
            raise self.fail("Illegal move to CPU inside the model: return the tensor as an output instead")
        for tensor in flatten([args, kwargs]):
            if self.node_of(tensor) is None:
                kind = "CPU" if not tensor.is_meta else "foreign"
                raise self.fail(f"Expected all tensors on the IPU, but {name} mixes them with a {kind} tensor of shape "
                                f"{list(tensor.shape)}. Register it as a buffer, or move it with .to(x.device)")
        return args, kwargs

    def _refuse(self, func: Any, name: str, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        base = optable.base_name(name)
        if base in optable.HOST_READS:
            raise self.fail(f"aten::{name} reads a value on the host, which is impossible in a static graph "
                            "(.item(), bool(tensor), if tensor, print(tensor))")
        masked = name == "index" and any(item is not None and item.dtype in (torch.bool, torch.uint8) for item in args[1])
        if base in optable.DYNAMIC or masked:
            what = "reading with a boolean mask" if masked else f"aten::{name}"
            raise self.fail(f"{what} has a result whose shape depends on the data; use torch.where or a fixed size")
        problem = refused_arguments(base, func, args, kwargs)
        if problem:
            raise self.fail(problem)
        if base == "index_put" and (args[3] if len(args) > 3 else kwargs.get("accumulate", False)):
            self.note("index_put ignores accumulate=True: the last value written wins (IndexOps.cpp:228-306)")


class DispatchMode(TorchDispatchMode):
    """Shows the recorder each op below autograd."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.recorder.paused:
            return func(*args, **(kwargs or {}))
        return self.recorder.dispatch(func, args, kwargs or {})
