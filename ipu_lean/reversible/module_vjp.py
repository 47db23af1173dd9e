"""Vector-Jacobian products of modules: weights and buffers by name, dropout by given masks, discrete decisions kept, one
derivation for equal modules."""
from __future__ import annotations

from collections import OrderedDict
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from .decisions import Deciding, Decision
from .vjp import Allowed, Evaluation, Pullback, any_op, derive

Kwargs = Dict[str, Tensor]
Tensors = Tuple[Tensor, ...]


class Mask(NamedTuple):
    """One dropout of a module: the shape of what it drops from, and the share that it drops."""

    shape: Tuple[int, ...]
    rate: float


class Derived(NamedTuple):
    """What was derived for inputs of one shape.

    Attributes:
        whole: value and gradients; the last of its constants are the decisions' tensors.
        masks: the dropouts. deciding: where the module decides something, its value, extras and then the decisions' tensors.
    """

    whole: Pullback
    masks: List[Mask]
    deciding: Optional[Pullback] = None
    decided: int = 0


class ModuleVJP:
    """`module(*inputs, **kwargs)` and its gradients, as graphs of forward operations (vjp.py).

    A graph is derived at the first request for inputs of its shapes and types. Weights and mode may change afterwards; whoever
    changes anything else in the module needs a new one of these.

    Args:
        module: called as a module; it may draw random numbers by dropout only, and decide discrete things by `remember` only.
        allowed: the operations of the device, see `derive`.
        names: the parameters that it reads, if it is known to read no other tensor of the module; default: all, and the buffers.
        values: how many of the results take a cotangent; the others are extras. A lone tensor counts as one value.
        cache: derivations, shared between modules of one build and size; give several modules the same dictionary.
    """

    def __init__(
        self,
        module: nn.Module,
        allowed: Allowed = any_op,
        names: Optional[Sequence[str]] = None,
        values: int = 1,
        cache: Optional[Dict[Any, Any]] = None,
    ) -> None:
        self.module, self.allowed, self.count = module, allowed, values
        self.names = [name for name, _ in module.named_parameters()] if names is None else list(names)
        self._all = names is None
        self._cache = {} if cache is None else cache
        self._own: Dict[Any, Derived] = {}

    def __getstate__(self) -> Dict[str, Any]:
        return {**self.__dict__, "_cache": {}, "_own": {}}  # graphs cannot be pickled; they are derived again

    def parameters(self) -> List[nn.Parameter]:
        """The parameters in the order of their gradients, as the module has them now."""
        return [self.module.get_parameter(name) for name in self.names]

    def ready(self, inputs: Sequence[Tensor], kwargs: Optional[Kwargs] = None) -> bool:
        """Whether inputs of these shapes and types have been derived for, in the module's present mode."""
        return self._key(inputs, kwargs or {}) in self._own

    def masks(self, inputs: Sequence[Tensor], kwargs: Optional[Kwargs] = None) -> List[Mask]:
        """The dropouts of one call, in order; none outside training."""
        return self._derived(inputs, kwargs or {}).masks

    def pullback(self, inputs: Sequence[Tensor], kwargs: Optional[Kwargs] = None) -> Pullback:
        """The graph for inputs of these shapes and types; derived at the first request.

        Raises:
            Underivable: see `derive`.
        """
        return self._derived(inputs, kwargs or {}).whole

    def begin(
        self,
        inputs: Sequence[Tensor],
        kwargs: Optional[Kwargs] = None,
        masks: Sequence[Tensor] = (),
        pull: bool = True,
        decisions: Sequence[Tensor] = (),
    ) -> Evaluation:
        """Compute the module's value with its weights detached. The gradients that `pull` gives: of the inputs, then by `names`.

        Args:
            masks: bool, one for each of `masks()`: True is kept. pull: see `Pullback.begin`.
            decisions: those of an earlier evaluation (its `decisions`); otherwise the module decides anew.
        """
        kwargs = kwargs or {}
        derived = self._derived(inputs, kwargs)
        primals = [*inputs, *(parameter.detach() for parameter in self.parameters())]
        constants = [*(kwargs[key] for key in sorted(kwargs)), *(t.detach() for t in self._others()), *masks]
        if derived.deciding is None:
            return derived.whole.begin(primals, constants, pull)
        if not decisions:
            first = derived.deciding.begin(primals, constants, False)
            plain = len(first.extras) - derived.decided
            first.extras, first.decisions = first.extras[:plain], first.extras[plain:]
            if not pull:
                return first
            decisions = first.decisions
        found = derived.whole.begin(primals, [*constants, *decisions], pull)
        found.decisions = tuple(decisions)
        return found

    def _others(self) -> List[Tensor]:
        """Tensors that are read and not differentiated: the buffers."""
        return list(self.module.buffers()) if self._all else []

    def _slots(self) -> List[Tuple[str, int]]:
        """Where the module holds the tensors that it reads: paths, and which of `parameters()` and `_others()` is there.

        A tensor may have several names, but each place in a module comes once: `functional_call` would not put it back otherwise.
        """
        order = {id(tensor): place for place, tensor in enumerate([*self.parameters(), *self._others()])}
        found, seen = [], set()
        for prefix, module in self.module.named_modules():  # each module once
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if id(tensor) in order and (id(module), name) not in seen:
                        seen.add((id(module), name))
                        found.append((f"{prefix}.{name}" if prefix else name, order[id(tensor)]))
        return found

    def _key(self, inputs: Sequence[Tensor], kwargs: Kwargs) -> Any:
        sizes = tuple((tuple(t.shape), t.dtype) for t in inputs)
        others = tuple((key, tuple(kwargs[key].shape), kwargs[key].dtype) for key in sorted(kwargs))
        weights = tuple(parameter.dtype for parameter in self.parameters())
        return self.module.training, weights, sizes, others

    def _derived(self, inputs: Sequence[Tensor], kwargs: Kwargs) -> Derived:
        key = self._key(inputs, kwargs)
        if key not in self._own:
            common = (key, tuple(self.names), self.count, fingerprint(self.module))
            if common not in self._cache:
                # The module is kept as well: the key may name objects of it by identity.
                self._cache[common] = (self._derive(inputs, kwargs), self.module)
            self._own[key] = self._cache[common][0]
        return self._own[key]

    def _derive(self, inputs: Sequence[Tensor], kwargs: Kwargs) -> Derived:
        count, keys, slots = len(inputs), sorted(kwargs), self._slots()
        fixed = len(keys) + len(self._others())
        masks: List[Mask] = []
        made: List[Decision] = []

        def run(primals: Tensors, constants: Tensors, found: Optional[List[Mask]], deciding: Deciding) -> Tuple[Tensors, Tensors]:
            tensors = [*primals[count:], *constants[len(keys) :]]
            own = {path: tensors[place] for path, place in slots}
            drawn = None if found is not None else constants[fixed : fixed + len(masks)]
            with _Dropouts(drawn, found), deciding:
                out = functional_call(self.module, own, primals[:count], dict(zip(keys, constants)), tie_weights=False)
            out = out if isinstance(out, tuple) else (out,)
            return out[: self.count], out[self.count :]

        def decides(primals: Tensors, constants: Tensors) -> Tuple[Tensors, Tensors]:
            deciding = Deciding()
            values, extras = run(primals, constants, None, deciding)
            return values, (*extras, *(tensor for decision in deciding.found for tensor in decision.tensors))

        def decided(primals: Tensors, constants: Tensors) -> Tuple[Tensors, Tensors]:
            return run(primals, constants, None, Deciding(made, constants[fixed + len(masks) :] if made else None))

        primals = tuple(_on_meta(tensor) for tensor in (*inputs, *self.parameters()))
        constants = tuple(_on_meta(tensor) for tensor in (*(kwargs[key] for key in keys), *self._others()))
        first = Deciding()
        run(primals, constants, masks, first)
        made += first.found
        constants += tuple(torch.empty(mask.shape, dtype=torch.bool, device="meta") for mask in masks)
        kept = [_on_meta(tensor) for decision in made for tensor in decision.tensors]
        whole = derive(decided, primals, (*constants, *kept), self.allowed)
        alone = derive(decides, primals, constants, self.allowed, pull=False) if kept else None
        return Derived(whole, masks, alone, len(kept))


class _Dropouts(TorchFunctionMode):
    """Dropout by given masks; or, with `found`, no dropout but a list of where there would be one."""

    def __init__(self, masks: Optional[Sequence[Tensor]], found: Optional[List[Mask]]) -> None:
        super().__init__()
        self._masks, self._found = iter(masks or ()), found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.dropout:
            return func(*args, **(kwargs or {}))
        return self._drop(*args, **(kwargs or {}))

    def _drop(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        if self._found is not None:
            self._found.append(Mask(tuple(input.shape), p))
            return input
        return input * (next(self._masks).to(input.dtype) / (1.0 - p))


def draw(masks: Sequence[Mask], like: Tensor) -> List[Tensor]:
    """One bool tensor for each mask, drawn as torch draws dropout; True is kept.

    Made from `like`, an input of the step, so that no compiler takes the masks for constants.
    """
    one = like.detach().reshape(-1)[:1] * 0.0 + 1.0
    return [F.dropout(one.expand(mask.shape).contiguous(), mask.rate, True) != 0.0 for mask in masks]


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


_TABLES = ("_parameters", "_buffers", "_modules")


def fingerprint(module: nn.Module) -> Any:
    """Equal for modules that compute the same from the same tensors: class, plain attributes, shapes, children.

    What is no plain value (a hook, a tensor, a foreign object) counts by identity. A class names in `not_computed_with` the
    attributes that its forward pass does not read (where the numbers in its buffers come from).
    """
    unread = (*_TABLES, *getattr(type(module), "not_computed_with", ()))
    attributes = tuple((key, _plain(value)) for key, value in sorted(module.__dict__.items()) if key not in unread)
    tensors = tuple(
        (name, None if tensor is None else (tuple(tensor.shape), tensor.dtype))
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
    )
    children = tuple((name, None if child is None else fingerprint(child)) for name, child in module._modules.items())
    return type(module), attributes, tensors, children


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return type(value), value
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_plain(item) for item in value)
    if isinstance(value, (set, frozenset)):
        return type(value), tuple(sorted(map(repr, value)))
    if isinstance(value, (dict, OrderedDict)) and not value:
        return "empty"
    return "object", id(value)
