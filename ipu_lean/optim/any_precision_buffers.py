"""Parameters of one group laid out in one buffer, their state in others, and the blocks in which an update walks over them.

A parameter becomes a view of the buffer where that is safe: dense, on a device with memory of its own, and alone in its storage
(not so: parts of FSDP's flat parameter, tensors tied by hand, memory shared with other processes). Others keep their memory and
are walked over one by one; the numbers are the same. Gradients stay where autograd puts them: large ones are read in place, small
ones are gathered block by block into scratch memory that stays in cache.
"""
from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import Any, Callable, Container, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from ipu_lean.errors import ConfigError

ALIGN = 32  # elements: 64 bytes of a 16-bit type, so that every parameter begins at a cache line
KEPT = ("compensation", "lower", "lowest")  # what a weight of few bits leaves over
LARGE, PAGE, MADV_HUGEPAGE = 1 << 23, 1 << 12, 14  # bytes, bytes, <linux/mman.h>
SMALL = 1 << 15  # elements; gradients below are gathered


class Block(NamedTuple):
    """Elements begin .. end of a buffer and their gradient `[end - begin]`; the next block overwrites that of a `passing` one."""

    begin: int
    end: int
    gradient: torch.Tensor
    passing: bool = False


class Stretch:
    """Parameters of one group with the same type and device, in one buffer (`flat`), or a single one in its own memory.

    Args:
        parameters: in the group's order. kinds: {state key: type} of what is kept for each element. position: of its first
            element among all elements of the optimizer, which decides what is drawn in stochastic rounding.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], kinds: Dict[str, torch.dtype], position: int, flat: bool) -> None:
        self.parameters = _in_order(parameters)
        self.kinds, self.position, self.flat = kinds, position, flat
        self.dtype, self.device = parameters[0].dtype, parameters[0].device
        self.begins = begins_of(self.parameters)
        self.size = self.begins[-1]
        self.weights: Optional[torch.Tensor] = None
        self.states: Dict[str, torch.Tensor] = {}
        self._slices: Dict[Tuple[int, int], Tuple[Optional[torch.Tensor], ...]] = {}
        self._gathered: Dict[torch.dtype, torch.Tensor] = {}
        self._adopted: Dict[int, List[Tuple[str, torch.Tensor]]] = {}
        self._copy: Optional[torch.Tensor] = None
        self._index: Optional[torch.Tensor] = None
        if flat:
            self._take_weights()

    def _take_weights(self) -> None:
        self.weights = common_buffer(self.parameters, self.begins)
        if self.weights is not None:
            return
        self.weights = _zeros(self.size, self.dtype, self.device)
        for parameter, begin in zip(self.parameters, self.begins):
            view = self.weights[begin : begin + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view

    def in_place(self) -> bool:
        """Whether every parameter is still where (and what) it was put."""
        if self.weights is None:
            return all(p.dtype == self.dtype and p.device == self.device for p in self.parameters)
        start, each = self.weights.data_ptr(), self.weights.element_size()
        return all(
            p.data_ptr() == start + begin * each and p.dtype == self.dtype for p, begin in zip(self.parameters, self.begins)
        )

    # -- state -----------------------------------------------------------------------------------------------------------
    def adopt(self, place: int, state: Dict[str, Any]) -> None:
        """Make the `state` of the parameter at `place` (new: empty; loaded: tensors of its own) views of this stretch's buffers,
        in its types.

        Raises:
            ConfigError: it holds what another way of summation keeps.
        """
        known = self._adopted.get(place)
        if known is not None and _holds(state, known):
            return
        _check_kept(state, self.kinds)
        if not self.states:
            self.states = {key: _zeros(self.size, kind, self.device) for key, kind in self.kinds.items()}
        parameter, begin = self.parameters[place], self.begins[place]
        state.setdefault("step", torch.tensor(0.0))
        self._adopted[place] = []
        for key, buffer in self.states.items():
            view = buffer[begin : begin + parameter.numel()].view(parameter.shape)
            held = state.get(key)
            if held is None:
                # Nothing left over is 2^15: see `lower`'s offset in the rules.
                view.fill_(128 if key == "lower" else 0)
            elif held.data_ptr() != view.data_ptr() or held.dtype != view.dtype:
                view.copy_(held)
            state[key] = view
            self._adopted[place].append((key, view))

    # -- walking ---------------------------------------------------------------------------------------------------------
    def blocks(self, pieces: Sequence[Tuple[int, torch.Tensor]], longest: int) -> Iterator[Block]:
        """Blocks of at most `longest` elements over the `pieces` (begin, gradient), which are in order.

        Neighbours without a gap between them share a block where their gradients are small.
        """
        pending: List[Tuple[int, torch.Tensor]] = []
        for begin, gradient in pieces:
            size = gradient.numel()
            flat = gradient.reshape(-1)
            if pending and not self._joins(pending, begin, flat, longest):
                yield self._gather(pending)
                pending = []
            if size < SMALL and size <= longest:
                pending.append((begin, flat))
                continue
            for start in range(0, size, longest):
                stop = min(start + longest, size)
                yield Block(begin + start, begin + stop, bare(flat, start, stop))
        if pending:
            yield self._gather(pending)

    @staticmethod
    def _joins(pending: List[Tuple[int, torch.Tensor]], begin: int, flat: torch.Tensor, longest: int) -> bool:
        """Whether the next piece goes into the same block."""
        first, (last, gradient) = pending[0][0], pending[-1]
        touches = last + gradient.numel() == begin
        return touches and flat.dtype == gradient.dtype and flat.numel() < SMALL and begin + flat.numel() - first <= longest

    def _gather(self, pending: List[Tuple[int, torch.Tensor]]) -> Block:
        """The pieces as one block; valid until the next one is gathered."""
        begin, dtype = pending[0][0], pending[0][1].dtype
        if len(pending) == 1:
            only = pending[0][1]
            return Block(begin, begin + only.numel(), bare(only, 0, only.numel()))
        end = pending[-1][0] + pending[-1][1].numel()
        held = self._gathered.get(dtype)
        if held is None or held.numel() < end - begin:
            held = self._gathered[dtype] = torch.empty(end - begin, dtype=dtype, device=self.device)
        out = held[: end - begin]
        torch.cat([gradient for _, gradient in pending], out=out)
        return Block(begin, end, bare(out, 0, end - begin), passing=True)

    def slices(self, begin: int, end: int) -> Tuple[Optional[torch.Tensor], ...]:
        """(weights, exp_avg, exp_avg_sq, compensation or lower or None, lowest or None) of elements begin .. end; remembered, as
        they stay."""
        found = self._slices.get((begin, end))
        if found is None:
            weights = self.weights if self.weights is not None else self._own_memory()
            states = [bare(buffer, begin, end) for buffer in self.states.values()]
            found = (bare(weights, begin, end), *states, *[None] * (4 - len(states)))
            if self.flat:  # other weights may move without notice
                self._slices[begin, end] = found
        return found

    def index(self, length: int) -> torch.Tensor:
        """0, 1, … as int32 `[length]`."""
        if self._index is None or self._index.numel() < length:
            self._index = torch.arange(length, dtype=torch.int32, device=self.device)
        return self._index

    def _own_memory(self) -> torch.Tensor:
        """The single parameter, flat; one that is not contiguous is copied until `finish`."""
        weight = self.parameters[0].detach()
        if weight.is_contiguous():
            return weight.view(-1)
        if self._copy is None:
            self._copy = weight.contiguous()
        return self._copy.view(-1)

    def finish(self) -> None:
        """After an update. An index is made again in no time, and would hold 4 bytes an element of a block (on a GPU of all)."""
        self._index = None
        if self._copy is not None:
            self.parameters[0].copy_(self._copy)
            self._copy = None


def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A buffer of zeros; large ones in pages of 2 MiB where Linux gives them to those who ask (before the first touch)."""
    buffer = torch.empty(size, dtype=dtype, device=device)
    length = size * buffer.element_size()
    if device.type == "cpu" and sys.platform == "linux" and length >= LARGE:
        begin = -(-buffer.data_ptr() // PAGE) * PAGE
        length = (buffer.data_ptr() + length - begin) // PAGE * PAGE
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(length), MADV_HUGEPAGE)
    return buffer.zero_()


def _holds(state: Dict[str, Any], known: Sequence[Tuple[str, torch.Tensor]]) -> bool:
    for key, view in known:  # noqa: SIM110 - `all` takes four times as long, and this runs for each parameter at each step
        if state.get(key) is not view:
            return False
    return True


def _check_kept(state: Dict[str, Any], kinds: Dict[str, torch.dtype]) -> None:
    for key in KEPT:
        held = state.get(key)
        if held is not None and (key not in kinds or key != "compensation" and held.dtype != kinds[key]):
            raise ConfigError(
                f"the saved optimizer state keeps `{key}` ({held.dtype}) beside each weight, this optimizer does not",
                key="optimizer.summation",
                suggestion="go on with the summation that the state was saved with",
            )


def bare(flat: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """`flat[begin:end]`, in the same memory but not a view of `flat` for autograd: compiled code checks the base of every view it
    is given, and would be compiled anew for bases of other sizes."""
    whole = flat.untyped_storage()
    start = flat.storage_offset() + begin
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(whole, start, (end - begin,), (1,))


def movable(parameter: torch.Tensor, own: Container[int]) -> bool:
    """Whether a parameter can become a view of a buffer without anybody noticing. `own`: storages that are such buffers."""
    if not _plain(parameter) or (parameter.device.type == "cpu" and parameter.is_shared()):
        return False
    storage = parameter.untyped_storage()
    return storage.nbytes() == parameter.numel() * parameter.element_size() or storage.data_ptr() in own


def _plain(parameter: torch.Tensor) -> bool:
    usual = type(parameter) in (torch.Tensor, torch.nn.Parameter) and parameter.layout == torch.strided
    here = usual and parameter.device.type in ("cpu", "cuda") and parameter.numel() > 0
    return here and parameter.requires_grad and parameter.is_contiguous()


def stretches(
    parameters: Sequence[torch.Tensor],
    kinds_of: Callable[[torch.dtype], Dict[str, torch.dtype]],
    position: int,
    flatten: bool,
    own: Container[int] = (),
) -> List[Stretch]:
    """All parameters of one group in stretches; `kinds_of(dtype)` names the state that goes with a weight of that type."""
    shared: Dict[int, int] = {}
    for parameter in parameters:
        shared[parameter.data_ptr()] = shared.get(parameter.data_ptr(), 0) + 1
    together: Dict[Tuple[Any, ...], List[torch.Tensor]] = {}
    for parameter in parameters:
        place = (parameter.dtype, parameter.device)
        if not flatten or not _plain(parameter) or shared[parameter.data_ptr()] > 1:
            place = (*place, id(parameter))
        together.setdefault(place, []).append(parameter)
    ordered = _in_order(parameters)
    where = {id(parameter): position + begin for parameter, begin in zip(ordered, begins_of(ordered))}
    result: List[Stretch] = []
    for place, members in together.items():
        members = _in_order(members)
        kinds = kinds_of(members[0].dtype)
        flat = [p for p in members if movable(p, own)] if len(place) == 2 else []
        if len(place) == 2 and common_buffer(members, begins_of(members)) is not None:
            flat = members
        parts = ([(flat, True)] if flat else []) + [([p], False) for p in members if not any(p is f for f in flat)]
        for part, is_flat in parts:
            # The first of a group that is flat as a whole lies where it would lie alone: the same numbers are drawn either way.
            result.append(Stretch(part, kinds, where[id(_in_order(part)[0])], is_flat))
    return result


def _in_order(parameters: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    """Small ones first, so that they lie side by side."""
    return sorted(parameters, key=lambda p: p.numel() >= SMALL)


def begins_of(parameters: Sequence[torch.Tensor]) -> List[int]:
    """Where each begins, and where the last one ends, padding included."""
    ends = [0]
    for parameter in parameters:
        ends.append(ends[-1] - -parameter.numel() // ALIGN * ALIGN)
    return ends


def common_buffer(parameters: Sequence[torch.Tensor], begins: Sequence[int]) -> Optional[torch.Tensor]:
    """The buffer that the parameters are views of already, laid out like this (another optimizer made it); None if not."""
    first = parameters[0]
    storage = first.untyped_storage()
    if storage.nbytes() != begins[-1] * first.element_size():
        return None
    for parameter, begin in zip(parameters, begins):
        if parameter.untyped_storage().data_ptr() != storage.data_ptr() or parameter.storage_offset() != begin:
            return None
    return torch.empty(0, dtype=first.dtype, device=first.device).set_(storage, 0, (begins[-1],), (1,))
