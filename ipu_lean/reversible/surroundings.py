"""What a branch sees besides its inputs: random number generators, autocast, its parameters and its buffers.

A second run of a branch equals the first only in the same surroundings, and must leave no trace in them: the generators and the
buffers (BatchNorm's statistics, counters) stand afterwards where they stood before.
"""
from __future__ import annotations

import contextlib
from typing import Any, ContextManager, Dict, Iterator, List, Optional, Sequence, Set, Tuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ipu_lean._compat import autocast_state

Rng = List[Tuple[torch.device, Tensor]]
Autocast = Tuple[Any, ...]
Entry = Tuple[int, nn.Module, str, Tensor, int, Optional[Tensor]]
Member = Tuple[Dict[str, Any], str, Any]
Changed = Tuple[nn.Module, str, Optional[Tensor]]
_CPU = torch.device("cpu")
_PLAIN = (Tensor, nn.Parameter)  # so not the DTensors of FSDP 2
_NOTHING = contextlib.nullcontext()


def rng_state(device: torch.device) -> Rng:
    """State of torch's default generators: the CPU's, and that of `device` if it is another one."""
    states = [(_CPU, torch.get_rng_state())]
    if device.type != "cpu":
        library = getattr(torch, device.type, None)
        if hasattr(library, "get_rng_state"):
            states.append((device, library.get_rng_state(device)))
    return states


def set_rng_state(states: Rng) -> None:
    """Put the generators back to what `rng_state` returned."""
    for device, state in states:
        if device.type == "cpu":
            torch.set_rng_state(state)
        else:
            getattr(torch, device.type).set_rng_state(state, device)


def current_autocast(device: torch.device) -> Autocast:
    """(whether casts of weights are cached, then kind, enabled, dtype for the CPU and for the type of `device`)."""
    state = (torch.is_autocast_cache_enabled(), "cpu", *autocast_state("cpu"))
    return state if device.type == "cpu" else (*state, device.type, *autocast_state(device.type))


@contextlib.contextmanager
def cast_cache(enabled: bool) -> Iterator[None]:
    """Autocast with or without its cache of cast weights."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(enabled)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


# For each branch and training mode: which buffers its last recorded run changed (missing: never run, so every buffer is suspect).
_CHANGING: WeakKeyDictionary = WeakKeyDictionary()


def _inside(top: nn.Module) -> List[nn.Module]:
    """The modules in `top`; much quicker than `top.modules()`, which matters in small models."""
    found = [top]
    for module in found:
        if module._modules:
            found += [child for child in module._modules.values() if child is not None]
    return found


class Members:
    """The tensors that are the parameters and buffers of some modules during a run (`inside`: lists of modules).

    `torch.func.functional_call` and assignments to a module's attribute put others in their place before the backward pass comes;
    the second run gets the ones of the first. What FSDP exchanges (shards and views of them) is its own business and left alone.
    """

    __slots__ = ("_entries",)

    def __init__(self, inside: Sequence[List[nn.Module]]) -> None:
        self._entries: List[Member] = []
        for modules in inside:
            for module in modules:
                if module._parameters and "_is_fsdp_managed_module" not in module.__dict__:
                    for name, parameter in module._parameters.items():
                        self._entries.append((module._parameters, name, parameter))
                if module._buffers:
                    for name, buffer in module._buffers.items():
                        self._entries.append((module._buffers, name, buffer))

    def moved(self) -> List[Member]:
        """(dictionary, name, tensor of the run) where another plain tensor is in place now."""
        found = []
        for where, name, tensor in self._entries:
            now = where.get(name)
            if now is not tensor and type(now) in _PLAIN and type(tensor) in _PLAIN:
                found.append((where, name, tensor))
        return found


class Buffers:
    """The buffers in some modules around a recorded run: finds those that the run changes, and keeps their values from before.

    All buffers are copied before the first run of a module; later only those that the run before changed (BatchNorm's statistics
    are, a table of positions is not). A buffer that starts to change later is still updated only once; but its second run then
    reads the value after the first.
    """

    __slots__ = ("_entries", "_tops", "_modes")

    def __init__(self, tops: Sequence[nn.Module], inside: Sequence[List[nn.Module]]) -> None:
        self._tops, self._modes = tops, [top.training for top in tops]
        self._entries: List[Entry] = []
        for place, modules in enumerate(inside):
            for module in modules:
                if not module._buffers:
                    continue
                top = tops[place]
                suspects: Optional[Set[Tuple[int, str]]] = _CHANGING.get(top, {}).get(top.training)
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        copy = buffer.clone() if suspects is None or (id(module), name) in suspects else None
                        self._entries.append((place, module, name, buffer, buffer._version, copy))

    def changed(self) -> List[Changed]:
        """(module, name, value before the run or None if unknown) of the buffers that changed since this object was made."""
        found: List[Changed] = []
        if not self._entries:
            return found
        seen: List[Set[Tuple[int, str]]] = [set() for _ in self._tops]
        for place, module, name, buffer, version, copy in self._entries:
            replaced, written = module._buffers.get(name) is not buffer, buffer._version != version
            # The batch norm kernels write running statistics without a new version, so copies are compared by value.
            if replaced or written or (copy is not None and not torch.equal(copy, buffer)):
                seen[place].add((id(module), name))
                found.append((module, name, buffer if copy is None and not written else copy))
        for top, mode, names in zip(self._tops, self._modes, seen):
            _CHANGING.setdefault(top, {})[mode] = names
        return found


class Surroundings:
    """Those of one recorded run. Make it before the run, call `settle` right after it, use `replayed` around the second run."""

    __slots__ = ("_autocast", "_rng", "_device", "_members", "_buffers", "_changed")

    def __init__(self, modules: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        self._autocast = current_autocast(device)
        inside = [_inside(top) for top in modules]
        self._members = Members(inside)
        self._buffers: Optional[Buffers] = Buffers(modules, inside)
        self._changed: List[Changed] = []
        self._rng: Optional[Rng] = rng_state(device)

    def settle(self) -> None:
        """Forget what the run turned out not to touch: random numbers if none was drawn, buffers that did not change."""
        assert self._rng is not None and self._buffers is not None, "settle is called once"
        now = rng_state(self._device)
        if all(torch.equal(before, after) for (_, before), (_, after) in zip(self._rng, now)):
            self._rng = None
        self._changed = self._buffers.changed()
        self._buffers = None

    def replayed(self) -> ContextManager[None]:
        """The surroundings of the recorded run; on leaving, those outside are back."""
        now, moved = current_autocast(self._device), self._members.moved()
        if self._rng is None and not self._changed and not moved and now == self._autocast:
            return _NOTHING
        return self._replayed(now, moved)

    @contextlib.contextmanager
    def _replayed(self, now: Autocast, moved: List[Member]) -> Iterator[None]:
        outside = rng_state(self._device) if self._rng is not None else None
        current = [(module._buffers, name, module._buffers[name]) for module, name, _ in self._changed]
        current += [(where, name, where.get(name)) for where, name, _ in moved]
        try:
            for where, name, tensor in moved:
                where[name] = tensor
            for module, name, value in self._changed:
                value = module._buffers[name] if value is None else value
                module._buffers[name] = None if value is None else value.clone()
            if self._rng is not None:
                set_rng_state(self._rng)
            with contextlib.ExitStack() as entered:
                if now != self._autocast:
                    self._enter_autocast(entered)
                yield
        finally:
            if outside is not None:
                set_rng_state(outside)
            for where, name, tensor in current:
                where[name] = tensor

    def _enter_autocast(self, entered: contextlib.ExitStack) -> None:
        cache, *kinds = self._autocast
        entered.enter_context(cast_cache(cache))
        for kind, enabled, dtype in zip(kinds[::3], kinds[1::3], kinds[2::3]):
            if (enabled, dtype) != autocast_state(kind):
                entered.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cache))
