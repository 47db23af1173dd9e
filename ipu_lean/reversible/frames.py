"""A recorded run of a branch: autograd is given numbers instead of tensors, and the tensors are rebuilt when it asks for them.

`torch.autograd.graph.saved_tensors_hooks` lets us put anything in the place of a tensor that a backward node saves. Around a
branch we hand out numbers. The first number that a backward pass asks for makes the frame run its branch once more; the
tensors saved in this second run, in the same order, are the ones asked for. Each is given away once and forgotten by the frame.
The graph that autograd walks is the one of the first run, so parameter hooks, DDP, `torch.autograd.grad` and `retain_graph` meet
nothing unusual, and no backward pass is started inside another one.
"""
from __future__ import annotations

import threading
import weakref
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, TypeVar

import torch
from torch import Tensor, nn

from ipu_lean.errors import RunError

from .dynamo import without_dynamo
from .surroundings import Surroundings

T = TypeVar("T")
Tensors = Tuple[Tensor, ...]


class RecomputeError(RunError, RuntimeError):
    """The engine cannot rebuild what autograd asks for, and says why; it never hands out wrong numbers instead."""


class _Running(threading.local):
    """Frames whose function is running in this thread, the innermost last."""

    def __init__(self) -> None:
        self.frames: List[Frame] = []


_running = _Running()


def running_frame() -> Optional[Frame]:
    """The innermost frame whose function is running in this thread."""
    return _running.frames[-1] if _running.frames else None


@without_dynamo
def recomputing() -> bool:
    """True while the engine runs a branch a second time."""
    return any(frame.replaying for frame in _running.frames)


@without_dynamo
def remember(compute: Callable[[], T]) -> T:
    """A discrete decision of a branch (hash buckets, a permutation, a route), made once.

    `compute` runs without gradient in the branch's first run, and its result is kept with the engine's record of this call; the
    second run gets the kept result, in the order of the calls. The inputs of the second run differ from the first by rounding, so
    that a decision taken again could fall differently. Outside a recorded run it is just `compute()`.
    """
    return _remember(len(_running.frames) - 1, compute)


def _remember(level: int, compute: Callable[[], T]) -> T:
    if level < 0:
        with torch.no_grad():
            return compute()
    frame = _running.frames[level]
    if frame.replaying:
        return next(frame.replayed_decisions)
    frame.decisions.append(_remember(level - 1, compute))
    return frame.decisions[-1]


def graph_is_freed() -> bool:
    """Whether the backward pass that is running frees the graph behind it (False if this torch cannot tell)."""
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps is not None and torch._C._current_graph_task_id() != -1 and not keeps()


class Versions:
    """Tensors that must not be changed in place between two moments."""

    __slots__ = ("_seen",)

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._seen = [(t, t._version) for t in tensors if isinstance(t, Tensor) and not t.is_inference()]

    def changed(self) -> bool:
        """Whether one of them was."""
        return any(tensor._version != version for tensor, version in self._seen)

    def check(self, what: str) -> None:
        """RecomputeError that names `what` if one of them was."""
        if self.changed():
            raise RecomputeError(f"{what} was changed in place before the backward pass, which needs it as it was; change a copy")


class _Stop(BaseException):
    """Everything that was asked for has been rebuilt; the rest of the second run is not needed."""


class Hooks:
    """The pair of hooks around a first run. Autograd's nodes own it: when the last of them is freed, it is gone."""

    __slots__ = ("frame", "__weakref__")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame

    def pack(self, tensor: Tensor) -> Any:
        """A parameter stays itself (with its version), any other tensor becomes a number."""
        if _is_parameter(tensor):
            return tensor, tensor._version
        saved = self.frame.saved
        saved.append((tensor.shape, tensor.dtype))
        return len(saved) - 1

    def unpack(self, handle: Any) -> Tensor:
        """What autograd saved under `handle`."""
        if isinstance(handle, int):
            return self.frame.fetch(handle)
        parameter, version = handle
        if parameter._version != version:
            raise RecomputeError(
                f"a parameter of shape {tuple(parameter.shape)} was changed in place (an optimizer step?) between the forward "
                "pass and its backward pass"
            )
        return parameter


class Frame:
    """One recorded run of a function of tensors.

    Args:
        function: called with the tensors of the run and `kwargs`; returns a tensor or a tuple of tensors.
        modules: the modules that it runs (their buffers are guarded).
    Subclasses say where the inputs of the second run come from (`inputs`) and what becomes of its result (`finish`).
    """

    __slots__ = (
        "function", "modules", "kwargs", "saved", "decisions", "replayed_decisions", "divisions", "replayed_divisions",
        "replaying", "surroundings", "_store", "_hooks", "_needs_grad", "_kwargs_versions", "_recorded", "_complete", "_awaited",
        "__weakref__",
    )  # fmt: skip

    piecewise = False  # whether a division that is all of the function may run piece by piece, and call `finish` at the end

    def __init__(self, function: Callable[..., Any], modules: Sequence[nn.Module], kwargs: Dict[str, Any]) -> None:
        self.function, self.modules, self.kwargs = function, modules, kwargs
        self.saved: List[Tuple[torch.Size, torch.dtype]] = []
        self.decisions: List[Any] = []
        self.replayed_decisions: Iterator[Any] = iter(())
        self.divisions: List[Tuple[weakref.ReferenceType[Any], bool]] = []  # (source, whether it needs gradients): division.py
        self.replayed_divisions: Iterator[Any] = iter(())
        self.replaying = self._recorded = False
        self._complete: Callable[[], bool] = bool
        self._awaited = 0
        self._store: Optional[Dict[int, Tensor]] = None
        self._kwargs_versions = Versions(list(kwargs.values()))

    def record(self, *inputs: Tensor) -> Any:
        """The first run, in the autograd graph; what its nodes would save is left out."""
        self._needs_grad = tuple(t.requires_grad for t in inputs)
        self.surroundings = Surroundings(self.modules, inputs[0].device)
        hooks = Hooks(self)
        self._hooks = weakref.ref(hooks)
        versions = Versions(inputs)
        with Entered(self), torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
            out = self.function(*inputs, **self.kwargs)
        self.surroundings.settle()
        self._recorded = True
        self._settle_divisions(inputs, out)
        if versions.changed():
            raise RecomputeError(f"{self.describe()} changes its input in place; a recomputed branch must leave it alone")
        return out

    def _settle_divisions(self, inputs: Tensors, out: Any) -> None:
        """Tells a divided computation whether it is all that this frame does. Then it is what autograd owns in our place."""
        alone = self.piecewise and len(self.divisions) == 1 and not self.saved
        for source in [reference() for reference, _ in self.divisions]:
            if source is not None:
                source.settle(inputs, out, alone)
                if source.whole:
                    self._hooks = weakref.ref(source)

    def provide(self, source: Any) -> None:
        """Sees to it that `source`, a divided computation of this frame, gets its input (`source.deliver`)."""
        self.rerun(executing=True)

    def delivered(self) -> None:
        """A divided computation got its input in a second run, which may end here if that was all that anybody wanted."""
        self._awaited -= 1
        if self._complete():
            raise _Stop

    def fetch(self, number: int) -> Tensor:
        """The tensor that the first run saved as `number`."""
        if not self._recorded:
            raise RecomputeError(f"{self.describe()} asks for gradients inside its own forward pass; use `memory.engine: store`")
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() != -1:
            raise RecomputeError(
                "gradients of gradients (create_graph=True) cannot pass a recomputed stack; use `memory.engine: store` for them"
            )
        if self._store is None or number not in self._store:
            self.rerun(executing=True)
        assert self._store is not None
        tensor = self._store.pop(number)
        if not self._store:
            self._store = None
        return tensor

    def rerun(self, executing: bool) -> None:
        """The second run. `executing`: a backward node of this frame asks; if not, only the result is wanted, nothing is kept."""
        inputs = self.inputs(executing)
        self._kwargs_versions.check("a keyword argument (mask, …) of a recomputed branch")
        out: Any = None
        self.replayed_decisions, self.replayed_divisions = iter(self.decisions), iter(self.divisions)
        with self.surroundings.replayed(), Entered(self, replaying=True):
            if executing:
                out = self._rebuild(inputs)
            else:
                out = self._result(inputs)
        self.finish(out)

    def _result(self, inputs: Tensors) -> Any:
        """What the function gives, nothing kept. Compiled code would be another one without gradients, and round differently."""
        if all(getattr(module, "_compiled_call_impl", None) is None for module in self.modules):
            with torch.no_grad():
                return self.function(*inputs, **self.kwargs)
        fresh = [t.detach().requires_grad_(needed) for t, needed in zip(inputs, self._needs_grad)]
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(_nothing, _nothing):
            return self.function(*fresh, **self.kwargs)

    def _rebuild(self, inputs: Tensors) -> Any:
        store: Dict[int, Tensor] = {}
        expected, stop_early = self.saved, self.may_stop_early()
        self._awaited = sum(reference() is not None for reference, _ in self.divisions)

        def complete() -> bool:
            return stop_early and not self._awaited and len(store) == len(expected)

        def keep(tensor: Tensor) -> Tensor:
            if _is_parameter(tensor):
                return tensor
            number = len(store)
            if number >= len(expected) or (tensor.shape, tensor.dtype) != expected[number]:
                raise RecomputeError(self._mismatch())
            store[number] = tensor = tensor.detach()
            if complete():
                raise _Stop
            return tensor

        fresh = [t.detach().requires_grad_(needed) for t, needed in zip(inputs, self._needs_grad)]
        out, self._complete = None, complete
        try:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, _itself):
                out = self.function(*fresh, **self.kwargs)
        except _Stop:
            pass
        finally:
            self._complete = bool  # never: it may not outlive its run, because it holds this frame
        if len(store) != len(expected):
            raise RecomputeError(self._mismatch())
        self._store = store
        return out

    def _mismatch(self) -> str:
        return (
            f"{self.describe()} did not save the same tensors in its second run as in its first: it depends on something beyond "
            "its inputs, torch's default random generators, autocast and its buffers (`remember` serves discrete decisions)"
        )

    def describe(self) -> str:
        """The modules by their class names, for messages."""
        return " + ".join(type(module).__name__ for module in self.modules)

    def inputs(self, executing: bool) -> Tensors:
        """Inputs for the second run."""
        raise NotImplementedError

    def may_stop_early(self) -> bool:
        """Whether the second run may end with the last tensor that is saved (its result is then None)."""
        raise NotImplementedError

    def finish(self, out: Any) -> None:
        """Takes the result of the second run (None if that ended early)."""
        raise NotImplementedError


def _is_parameter(tensor: Tensor) -> bool:
    """isinstance costs two microseconds here, and nearly all tensors are plain."""
    return type(tensor) is not Tensor and isinstance(tensor, nn.Parameter)


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _nothing(_: Any) -> Any:
    return None


class Entered:
    """Marks a frame, or what stands in for one (decisions.py), as running in this thread."""

    __slots__ = ("_frame", "_replaying")

    def __init__(self, frame: Any, replaying: bool = False) -> None:
        self._frame, self._replaying = frame, replaying

    def __enter__(self) -> None:
        self._frame.replaying = self._replaying
        _running.frames.append(self._frame)

    def __exit__(self, *error: Any) -> None:
        _running.frames.pop()
        self._frame.replaying = False
