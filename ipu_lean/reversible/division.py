"""Branches that compute in pieces, of which the backward pass has one at a time in memory.

A branch that is a sum over groups of heads, or computes each token for itself, is written as `begin` (x -> what each piece
reads), `piece` and a join (a sum, or rows put together). Each piece of a recorded call has a frame of its own, so autograd asks
for the tensors of one piece, uses them, and only then asks for those of the next. The pieces' inputs come from a `Source`:

- in an inverted half-step that is nothing but the division, from the streams after it; the pieces' results add up to the branch's
  output, with which the streams before it are derived: each piece runs twice, as an undivided branch would;
- elsewhere inside a frame, from its second run, which then goes through the pieces without keeping anything (so that they run
  three times, except where that second run can end with the last input that it delivers);
- outside of frames (`store`) they are kept.
"""
from __future__ import annotations

import weakref
from functools import partial
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn

from .dynamo import without_dynamo
from .engine import Kept, recording_needed
from .frames import Frame, Tensors, running_frame
from .surroundings import cast_cache

_HALVES = (torch.float16, torch.bfloat16)


class Pieces(NamedTuple):
    """How a computation of x [..., features] is divided.

    Attributes:
        begin: x -> the tensors of each piece. What is random here is drawn once, before all pieces.
        piece: (number, *tensors of the piece, **kwargs) -> its result.
        groups: for each piece the number of its group, 0, 0, …, 1, …; the results of a group are summed, and the sums of all
            groups are put together along their first dimension.
    """

    begin: Callable[[Tensor], List[Tensors]]
    piece: Callable[..., Tensor]
    groups: Sequence[int]


def divided(pieces: Pieces, x: Tensor, modules: Sequence[nn.Module], **kwargs: Any) -> Tensor:
    """The result of `pieces` on x; if gradients may be asked for, the pieces are recorded one by one.

    Args:
        modules: those that the pieces run (their buffers are guarded, see surroundings.py).
        kwargs: for every piece (a mask).
    """
    return _recorded(pieces, x, modules, kwargs) if recording_needed() else _in_turn(pieces, x, kwargs)


def _in_turn(pieces: Pieces, x: Tensor, kwargs: Dict[str, Any]) -> Tensor:
    return _join(pieces, x, (pieces.piece(number, *given, **kwargs) for number, given in enumerate(pieces.begin(x))))


def _join(pieces: Pieces, x: Tensor, results: Any) -> Tensor:
    sums: List[Tensor] = []
    for group, result in zip(pieces.groups, results):
        if group == len(sums):
            sums.append(result.to(_sum_type(pieces, result)))
        else:
            sums[group] = sums[group] + result
    return _shaped(sums[0] if len(sums) == 1 else torch.cat(sums), x)


def _sum_type(pieces: Pieces, result: Tensor) -> torch.dtype:
    """float32 for sums of 16-bit results: the second run adds them in another order, and the sum must come out the same."""
    summed = len(set(pieces.groups)) < len(pieces.groups)
    return torch.float32 if summed and result.dtype in _HALVES else result.dtype


def _shaped(joined: Tensor, x: Tensor) -> Tensor:
    """`joined`, in the shape of x but for the last dimension, and in 16 bits if x is."""
    joined = joined.to(x.dtype) if x.dtype in _HALVES else joined
    shape = (*x.shape[:-1], joined.shape[-1])
    return joined if joined.shape == shape else joined.view(shape)


@without_dynamo
def _recorded(pieces: Pieces, x: Tensor, modules: Sequence[nn.Module], kwargs: Dict[str, Any]) -> Tensor:
    frame = running_frame()
    if frame is None or not frame.replaying:
        return Source(pieces, frame, kwargs).record(x, modules)
    reference, needs_grad = next(frame.replayed_divisions)
    source = reference()
    if source is not None:
        source.deliver(x)
        frame.delivered()
    with torch.no_grad():
        out = _in_turn(pieces, x, kwargs)
    return out.detach().requires_grad_(needs_grad)


class Source:
    """One recorded division: finds the inputs of its pieces in the backward pass, and gathers what they compute there.

    Its frames own it, and autograd's nodes own them. `frame` is the frame in which the division ran, if any.
    """

    __slots__ = (
        "frame", "whole", "_pieces", "_kwargs", "_surroundings", "_saves", "_begun", "_ends", "_kept", "_x", "_given",
        "_waiting", "_sum", "__weakref__",
    )  # fmt: skip

    def __init__(self, pieces: Pieces, frame: Optional[Frame], kwargs: Dict[str, Any]) -> None:
        self.frame, self.whole = frame, False
        self._pieces, self._kwargs = pieces, kwargs
        self._surroundings: Any = None  # of `begin`
        self._saves = self._begun = False  # whether autograd will ask for tensors of `begin`, and whether it has
        self._ends: Optional[Tuple[Tensor, Tensor]] = None  # x and the result, until the frame has seen them
        self._kept: Optional[Kept] = None
        self._x: Optional[Tensor] = None
        self._given: Optional[List[Tensors]] = None
        self._waiting: Set[int] = set()
        self._sum: Optional[Tensor] = None

    def record(self, x: Tensor, modules: Sequence[nn.Module]) -> Tensor:
        """The first run. Autocast casts weights for each piece anew: the pieces' gradients of a weight add up in its own type."""
        with cast_cache(False):
            begin = _BeginFrame(self, modules)
            given = begin.record(x)
            self._surroundings, self._saves = begin.surroundings, bool(begin.saved)
            assert len(given) == len(self._pieces.groups), "each piece belongs to a group"
            recorded = (_PieceFrame(self, number, modules).record(*tensors) for number, tensors in enumerate(given))
            out = _join(self._pieces, x, recorded)
        if self.frame is None:
            self._kept = Kept((x,), "the input of a branch that is computed in pieces")
        else:
            self._ends = (x, out)
            self.frame.divisions.append((weakref.ref(self), out.requires_grad))
        return out

    def settle(self, inputs: Tensors, out: Any, alone: bool) -> None:
        """The frame's first run is over, with these inputs and this result; `alone`: it does nothing beside this division."""
        ends, self._ends = self._ends, None
        self.whole = alone and ends is not None and len(inputs) == 1 and ends[0] is inputs[0] and ends[1] is out

    # -- the second run ------------------------------------------------------------------------------------------------------
    def deliver(self, x: Tensor) -> None:
        """x as it was in the first run; all pieces are still to come."""
        self._x, self._given, self._sum, self._begun = x.detach(), None, None, False
        self._waiting = set(range(len(self._pieces.groups)))

    def input(self) -> Tensor:
        """x."""
        if self._x is None:
            if self._kept is not None:
                self.deliver(*self._kept.take(executing=True))
            else:
                assert self.frame is not None
                self.frame.provide(self)
        assert self._x is not None
        return self._x

    def tensors(self, number: int) -> Tensors:
        """What piece `number` reads."""
        x = self.input()
        if self._given is None:
            with self._surroundings.replayed(), torch.no_grad():
                self._given = self._pieces.begin(x)
        return self._given[number]

    def may_stop_early(self) -> bool:
        """Whether nobody needs the pieces' results."""
        return not self.whole or self.frame.may_stop_early()

    def began(self) -> None:
        """The beginning has run once more, for its own gradient."""
        self._begun = True
        self._drop()

    def ran(self, number: int, out: Optional[Tensor]) -> None:
        """Piece `number` has; the last one completes the frame's second run."""
        if number not in self._waiting:
            return
        if out is not None:
            self._gather(number, out.detach())
        self._waiting.discard(number)
        if not self._waiting:
            total, self._sum, self._given = self._sum, None, None
            if self.whole:
                self.frame.finish(None if total is None else _shaped(total, self._x))
            self._drop()

    def _gather(self, number: int, out: Tensor) -> None:
        """Adds a result to its group's place in the joined one."""
        groups = self._pieces.groups
        rows = {group: given[0].shape[0] for group, given in zip(groups, self._given)}
        if self._sum is None:
            shape = (sum(rows.values()), *out.shape[1:])
            self._sum = torch.empty(shape, dtype=_sum_type(self._pieces, out), device=out.device)
        mine = groups[number]
        start = sum(rows[group] for group in range(mine))
        place = self._sum[start : start + rows[mine]]
        first = all(other == number or other in self._waiting for other, group in enumerate(groups) if group == mine)
        if first:
            place.copy_(out)
        else:
            place.add_(out)

    def _drop(self) -> None:
        if not self._waiting and (self._begun or not self._saves):
            self._x = None


class _BeginFrame(Frame):
    """The part before all pieces."""

    __slots__ = ("_source",)

    def __init__(self, source: Source, modules: Sequence[nn.Module]) -> None:
        super().__init__(source._pieces.begin, modules, {})
        self._source = source

    def inputs(self, executing: bool) -> Tensors:
        """x."""
        return (self._source.input(),)

    def may_stop_early(self) -> bool:
        """Always: the pieces have had its result."""
        return True

    def finish(self, out: Any) -> None:
        """Nothing is made of the result."""
        self._source.began()


class _PieceFrame(Frame):
    """One piece."""

    __slots__ = ("_source", "_number")

    def __init__(self, source: Source, number: int, modules: Sequence[nn.Module]) -> None:
        super().__init__(partial(source._pieces.piece, number), modules, source._kwargs)
        self._source, self._number = source, number

    def inputs(self, executing: bool) -> Tensors:
        """Its share of what the beginning makes of x."""
        return self._source.tensors(self._number)

    def may_stop_early(self) -> bool:
        """If only its tensors are wanted."""
        return self._source.may_stop_early()

    def finish(self, out: Any) -> None:
        """Handed to the source."""
        self._source.ran(self._number, out)
