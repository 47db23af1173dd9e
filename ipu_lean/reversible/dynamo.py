"""What torch.compile must leave alone."""
from __future__ import annotations

import sys
from functools import wraps
from typing import Any, Callable, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def without_dynamo(function: F) -> F:
    """`function`, run as it is in a compiled model.

    torch.compile cannot cut its graphs at saved-tensor hooks, and would bake in what depends on the run. Branches may be compiled
    one by one. torch 2.0 would load its compiler for this; there it is only asked for if it has been loaded already.
    """
    disable = getattr(torch, "_disable_dynamo", None)
    if disable is not None:
        return disable(function)

    @wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        dynamo = sys.modules.get("torch._dynamo")
        return function(*args, **kwargs) if dynamo is None else dynamo.disable(function)(*args, **kwargs)

    return plain
