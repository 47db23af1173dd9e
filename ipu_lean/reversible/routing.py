"""Which keyword arguments of a stack (mask, cache, …) reach which branch: those that the branch's `forward` names."""
from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, Callable, Dict, FrozenSet, Iterable, Optional, Set

from torch import nn

# Wrappers that take **kwargs themselves keep the wrapped module under one of these names (torch.compile, DDP and FSDP).
_WRAPPED = ("_orig_mod", "module")


@lru_cache(maxsize=512)
def _names(function: Callable[..., Any]) -> Optional[FrozenSet[str]]:
    """Names that `function` can take by keyword; None means any (it has **kwargs)."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def accepted_names(branch: nn.Module) -> Optional[FrozenSet[str]]:
    """Keyword names that `branch` takes, looking through wrappers; None means any."""
    for wrapped in _WRAPPED:
        inner = getattr(branch, wrapped, None)
        if isinstance(inner, nn.Module):
            return accepted_names(inner)
    forward = branch.__dict__.get("forward", None) or type(branch).forward
    return _names(forward)


def kwargs_for(branch: nn.Module, kwargs: Dict[str, Any]) -> Dict[str, Any]:
    """The part of `kwargs` that `branch` takes."""
    if not kwargs:
        return kwargs
    names = accepted_names(branch)
    return kwargs if names is None else {key: value for key, value in kwargs.items() if key in names}


def check_kwargs(branches: Iterable[nn.Module], kwargs: Dict[str, Any]) -> Dict[str, Any]:
    """`kwargs` without those that are None (absent); TypeError if one of the rest would reach no branch."""
    given = {key: value for key, value in kwargs.items() if value is not None}
    if not given:
        return given
    unused: Set[str] = set(given)
    for branch in branches:
        names = accepted_names(branch)
        if names is None:
            return given
        unused -= names
        if not unused:
            return given
    raise TypeError(f"no branch of this stack takes the keyword argument(s) {', '.join(sorted(unused))}")
