"""The recomputing engines: `invert` (nothing kept per layer) and `checkpoint` (the state kept every few layers).

Both are made of frames (frames.py), one for each branch or segment and call. They differ in where a frame finds the inputs of
its second run: a checkpoint keeps them; an inverted chain derives them from what comes after, beginning with the two streams that
the last half-step reads.

Who owns what, so that memory goes as soon as it can and never later: autograd's nodes own their frame; a frame owns the state
after it; a state owns the frame that it must be derived with, until it has been derived.
"""
from __future__ import annotations

import weakref
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from .couplings import Coupling
from .dynamo import without_dynamo
from .frames import Frame, Hooks, RecomputeError, Tensors, Versions, graph_is_freed, recomputing, remember

__all__ = ["Chain", "RecomputeError", "recomputing", "recording_needed", "remember", "run_segments", "without_dynamo"]

_FREED = (
    "the recomputed stack has already freed what this backward pass asks for; "
    "say retain_graph=True in the first backward pass if you need a second one"
)


def recording_needed() -> bool:
    """Whether a backward pass can follow this call; without one nothing is recorded.

    Inside `torch.func` transforms (grad, vjp, vmap) neither: they allow no saved-tensor hooks, so a stack runs as with `store`.
    """
    return torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active()


class State:
    """The two streams between two half-steps of a recorded call: there, or to be derived from what follows."""

    __slots__ = ("pair", "_frame", "_hooks", "__weakref__")

    def __init__(self, frame: InvertedFrame) -> None:
        self.pair: Optional[Tensors] = None
        self._frame: Optional[InvertedFrame] = frame
        self._hooks: Optional[weakref.ReferenceType[Hooks]] = None

    def deposit(self, pair: Tensors, hooks: weakref.ReferenceType[Hooks]) -> None:
        """Now they are there. If autograd still owns the frame after us, leave it to autograd when that frame ends."""
        self.pair = pair
        if hooks() is not None:
            self._frame, self._hooks = None, hooks

    def take(self, executing: bool) -> Tensors:
        """The streams; the state does not hold them any longer."""
        if self.pair is None:
            hooks = None if self._hooks is None else self._hooks()
            frame = self._frame if hooks is None else hooks.frame
            if frame is None:
                raise RecomputeError(_FREED)
            frame.rerun(executing=False)
        pair, self.pair = self.pair, None
        assert pair is not None
        return pair


class Kept:
    """Tensors that are simply kept until a second run needs them; `what` they are is for messages."""

    __slots__ = ("_tensors", "_versions", "_what")

    def __init__(self, tensors: Tensors, what: str) -> None:
        self._tensors: Optional[Tensors] = tuple(t.detach() for t in tensors)
        self._versions, self._what = Versions(self._tensors), what

    def take(self, executing: bool) -> Tensors:
        """The tensors; given up if the backward pass that runs frees its graph and `executing` nodes of it are what asks."""
        if self._tensors is None:
            raise RecomputeError(_FREED)
        self._versions.check(self._what)
        tensors = self._tensors
        if executing and graph_is_freed():
            self._tensors, self._versions = None, Versions(())
        return tensors


class InvertedFrame(Frame):
    """A half-step whose inputs are rebuilt from its outputs: what the branch reads, and then the streams before it.

    The first and the last one of a call have their input kept instead. The first: the errors of all later half-steps would add up
    in the stack's input, and that is often small beside the branch outputs that were added to it, so that a norm would magnify
    them. The last: keeping the streams before it costs no more than keeping those after it. Second runs whose result is then not
    needed end with the last tensor that they save, which in most branches spares the last matrix product.
    """

    __slots__ = ("coupling", "step", "kept", "after", "before", "_streams")
    piecewise = True

    def __init__(self, branch: nn.Module, coupling: Coupling, step: int, kwargs: Dict[str, Any]) -> None:
        super().__init__(self.function_of(branch, coupling, step), (branch,), kwargs)
        self.coupling, self.step = coupling, step
        self.kept: Optional[Kept] = None
        self.after: Any = None
        self.before: Optional[weakref.ReferenceType[State]] = None
        self._streams: Optional[Tensors] = None

    @staticmethod
    def function_of(branch: nn.Module, coupling: Coupling, step: int) -> Any:
        """What is recorded: the branch alone, since a linear coupling saves nothing."""
        return branch

    def run(self, a: Tensor, b: Tensor) -> Tuple[Tensors, Tensors]:
        """The first run: (what a kept second run would start from, the streams after it)."""
        z = self.coupling.read(a, b, self.step)
        return (z,), self.coupling.forward(a, b, self.record(z), self.step)

    def inputs(self, executing: bool) -> Tensors:
        """Kept, or from the state after this half-step."""
        if self.kept is not None:
            return self.kept.take(executing)
        if self._streams is None:  # else the pieces of a divided branch have begun to run, and are not done
            self._streams = self.after.take(executing)
        return self.from_streams(self._streams)

    def from_streams(self, streams: Tensors) -> Tensors:
        """What the recorded function takes, from the streams after it."""
        return (self.coupling.read_back(*streams, self.step),)

    def provide(self, source: Any) -> None:
        """A divided branch runs piece by piece and ends with our `finish`; if there is more to the branch, all of it is run."""
        if source.whole:
            source.deliver(*self.inputs(executing=True))
        else:
            self.rerun(executing=True)

    def may_stop_early(self) -> bool:
        """If no earlier half-step needs the state before this one: the first two, and the last."""
        return self.before is None or self.before() is None

    def finish(self, out: Any) -> None:
        """Derives the state before this half-step."""
        streams, self._streams = self._streams, None
        before = None if self.before is None else self.before()
        if before is not None and streams is not None:
            before.deposit(self.undone(streams, out), self._hooks)

    def undone(self, streams: Tensors, out: Any) -> Tensors:
        """The streams before, from those after and the result of the second run."""
        with torch.no_grad():
            return self.coupling.inverse(*streams, out.detach(), self.step)


class _Coupled:
    """Branch and coupling as one function of the two streams, forward or, given the streams after it, the same once more."""

    __slots__ = ("branch", "coupling", "step", "behind", "before", "_needs")

    def __init__(self, branch: nn.Module, coupling: Coupling, step: int) -> None:
        self.branch, self.coupling, self.step = branch, coupling, step
        self.behind = False
        self.before: Optional[Tensors] = None
        self._needs: Tuple[bool, ...] = ()

    def __call__(self, a: Tensor, b: Tensor, **kwargs: Any) -> Tensors:
        if self.behind:
            return self._again(a, b, kwargs)
        z = self.coupling.read(a, b, self.step)
        self._needs = (a.requires_grad, b.requires_grad, z.requires_grad)
        return self.coupling.forward(a, b, self.branch(z, **kwargs), self.step)

    def _again(self, a: Tensor, b: Tensor, kwargs: Dict[str, Any]) -> Tensors:
        with torch.no_grad():
            z = self.coupling.read_back(a, b, self.step)
        fx = self.branch(z.detach().requires_grad_(self._needs[2]), **kwargs)
        with torch.no_grad():
            self.before = self.coupling.inverse(a, b, fx.detach(), self.step)
        a, b = (t.detach().requires_grad_(needed) for t, needed in zip(self.before, self._needs))
        return self.coupling.forward(a, b, fx, self.step)


class CoupledFrame(InvertedFrame):
    """The same for a coupling whose own nodes save tensors (affine): the frame records it together with the branch."""

    __slots__ = ()

    @staticmethod
    def function_of(branch: nn.Module, coupling: Coupling, step: int) -> Any:
        """Branch and coupling."""
        return _Coupled(branch, coupling, step)

    def run(self, a: Tensor, b: Tensor) -> Tuple[Tensors, Tensors]:
        """The first run: both streams are what a kept second run would start from."""
        return (a, b), self.record(a, b)

    def inputs(self, executing: bool) -> Tensors:
        """Kept, or the streams after it, and then the function is told so."""
        self.function.behind = self.kept is None
        return super().inputs(executing)

    def from_streams(self, streams: Tensors) -> Tensors:
        """The streams themselves."""
        return streams

    def undone(self, streams: Tensors, out: Any) -> Tensors:
        """What the function found on its way."""
        before, self.function.before = self.function.before, None
        assert before is not None
        return before


class Chain:
    """One recorded call of a reversible stack."""

    def __init__(self) -> None:
        self._frames: Tuple[Any, Any] = (None, None)  # the last two
        self._streams: Optional[Tensors] = None  # before the last half-step
        self._taken: Tensors = ()  # by the last half-step
        self._halves = 0

    def half_step(
        self, branch: nn.Module, coupling: Coupling, a: Tensor, b: Tensor, step: int, kwargs: Dict[str, Any]
    ) -> Tuple[Tensor, Tensor]:
        """The streams [batch, seq, width] before and after."""
        kind = InvertedFrame if coupling.linear else CoupledFrame
        frame, previous = kind(branch, coupling, step, kwargs), self._frames[1]
        self._taken, after = frame.run(a, b)
        if self._halves == 0:
            frame.kept = Kept(self._taken, "the input of a reversible stack")
        if self._halves > 1:  # nobody asks for the state after the first half-step, whose input is kept
            state = State(frame)
            previous.after, frame.before = state, weakref.ref(state)
        self._frames, self._streams = (previous, frame), (a, b)
        self._halves += 1
        return after

    def finish(self) -> None:
        """After the last half-step: the streams before it are kept, and all others are derived from them."""
        previous, last = self._frames
        if self._halves > 1:
            what = "a stream of a reversible stack (its output `x`?)"
            last.kept, last.before = Kept(self._taken, what), None
            if self._halves > 2:
                previous.after = Kept(self._streams, what)
        self._frames, self._streams, self._taken = (None, None), None, ()


class SegmentFrame(Frame):
    """A run of blocks whose inputs are kept until its second run."""

    __slots__ = ("_kept",)

    def __init__(
        self, blocks: Sequence[nn.Module], state: Tensors, kwargs: Dict[str, Any], step: Optional[int] = None
    ) -> None:
        def run(*state: Tensor, **kwargs: Any) -> Tensors:
            return _run_blocks(blocks, state, kwargs, step)

        super().__init__(run, blocks, kwargs)
        self._kept = Kept(state, "the input of a checkpointed segment")

    def inputs(self, executing: bool) -> Tensors:
        """The kept ones."""
        return self._kept.take(executing)

    def may_stop_early(self) -> bool:
        """Always: nobody uses the result."""
        return True

    def finish(self, out: Any) -> None:
        """Nothing is made of the result."""


def _run_blocks(blocks: Sequence[nn.Module], state: Tensors, kwargs: Dict[str, Any], step: Optional[int]) -> Tensors:
    for block in blocks:
        if step is None:
            state = (block(*state, **kwargs),)
        else:
            state, step = block(*state, step=step, **kwargs), step + len(block.branches)
    return state


def run_segments(
    parts: Sequence[List[nn.Module]], state: Tensors, kwargs: Dict[str, Any], step: Optional[int] = None
) -> Tensors:
    """The blocks of all parts in a row, from state to state; each part is recorded and recomputed as one.

    Args:
        state: one stream, or the two of a reversible stack.
        step: number of the first half-step, for reversible blocks.
    """
    for part in parts:
        state = SegmentFrame(part, state, kwargs, step).record(*state)
        step = None if step is None else step + sum(len(block.branches) for block in part)
    return state
