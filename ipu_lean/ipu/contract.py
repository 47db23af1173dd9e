"""PopTorch 3.4's public surface as data: signatures, enum members, registered ATen handlers. Imports nothing heavy.

The facts come from PopTorch 3.4's source (each entry names its file and line). Whoever calls PopTorch binds the call here:

    >>> signature("poptorch.Options.Training.gradientAccumulation").bind(8)
"""
from __future__ import annotations

import inspect
import json
from functools import lru_cache
from pathlib import Path
from typing import Any, Dict, FrozenSet, List

_FILE = Path(__file__).with_name("poptorch_contract.json")
_ABSENT = inspect.Parameter.empty


@lru_cache(maxsize=1)
def load() -> Dict[str, Any]:
    """The whole contract, read once. Treat it as read-only."""
    with open(_FILE, encoding="utf-8") as file:
        return json.load(file)


def handlers() -> Dict[str, str]:
    """Each ATen op that PopTorch lowers, such as `aten::add`, and where its handler is registered (file:line)."""
    return dict(load()["aten_handlers_registered"])


def intercepted() -> FrozenSet[str]:
    """Overloads that PopTorch takes whole, before torch splits them into smaller ops (`dropout`, `one_hot`, …)."""
    return frozenset(load()["aten_intercepted_before_decomposition"])


def enum_members(name: str) -> Dict[str, Any]:
    """Members and values of an enum, such as `poptorch.OutputMode`. KeyError if PopTorch has no such enum."""
    return dict(load()["enums"][name]["members"])


def functions() -> List[str]:
    """Names of the public functions."""
    return sorted(load()["functions"])


def classes() -> List[str]:
    """Names of the public classes."""
    return sorted(load()["classes"])


def methods(name: str) -> List[str]:
    """Public methods of a class or an options group (`poptorch.Options`, `poptorch.Options.Training`)."""
    return sorted(_class(name)["methods"])


def properties(name: str) -> List[str]:
    """Properties of a class or an options group."""
    return sorted(_class(name)["properties"])


def where(name: str) -> str:
    """PopTorch's file and line of a function, class or enum."""
    data = load()
    for kind in ("functions", "enums"):
        if name in data[kind]:
            return data[kind][name]["where"]
    return _class(name)["where"]


def signature(name: str) -> inspect.Signature:
    """How PopTorch is called by that name; a method's `self` is left out. KeyError if PopTorch 3.4 has no such name.

    Defaults are PopTorch's source text (strings), since some of them are enum members; `bind` only cares that they exist.
    """
    data = load()
    if name in data["functions"]:
        return _signature(data["functions"][name]["params"])
    owner, _, leaf = name.rpartition(".")
    try:
        entry = _class(name)
    except KeyError:
        entry = _class(owner)["methods"][leaf]
        return _signature(entry["params"])
    init = entry.get("init")
    return _signature(init["params"]) if init else inspect.Signature()


def _class(name: str) -> Dict[str, Any]:
    data = load()
    for kind in ("classes", "private_classes"):
        if name in data[kind]:
            return data[kind][name]
    alias = data["reexports"].get(name, "")
    if alias.startswith("property -> "):
        return data["private_classes"]["poptorch." + alias[len("property -> "):]]
    raise KeyError(f"PopTorch 3.4 has no {name}")


def _signature(parameters: List[Dict[str, Any]]) -> inspect.Signature:
    kept = []
    for entry in parameters:
        if entry["name"] == "self":
            continue
        default = _ABSENT if entry["default"] is None else entry["default"]
        kept.append(inspect.Parameter(entry["name"], getattr(inspect.Parameter, entry["kind"]), default=default))
    return inspect.Signature(kept)
