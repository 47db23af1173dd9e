"""Nested inputs and outputs: find the tensors, put others in their place (python/_utils.py)."""
from __future__ import annotations

from typing import Any, Callable, Iterator, List

import torch


def flatten(structure: Any) -> List[torch.Tensor]:
    """The tensors of nested tuples, lists and dicts, in order; anything else is skipped."""
    if isinstance(structure, torch.Tensor):
        return [structure]
    if isinstance(structure, (tuple, list)):
        return [tensor for item in structure for tensor in flatten(item)]
    if isinstance(structure, dict):
        return [tensor for item in structure.values() for tensor in flatten(item)]
    return []


def map_tensors(structure: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """The same nesting with `function(tensor)` for each tensor; named tuples and dict subclasses keep their type."""
    if isinstance(structure, torch.Tensor):
        return function(structure)
    if isinstance(structure, tuple):
        items = [map_tensors(item, function) for item in structure]
        return type(structure)(*items) if hasattr(structure, "_fields") else tuple(items)
    if isinstance(structure, list):
        return [map_tensors(item, function) for item in structure]
    if isinstance(structure, dict):
        try:
            return type(structure)((key, map_tensors(value, function)) for key, value in structure.items())
        except TypeError:
            return {key: map_tensors(value, function) for key, value in structure.items()}
    return structure


def rebuild(structure: Any, tensors: Iterator[Any]) -> Any:
    """`structure` with its tensors replaced, in order, by what the iterator yields."""
    return map_tensors(structure, lambda _: next(tensors))
