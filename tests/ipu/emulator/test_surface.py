"""The emulator's names, signatures and enum members are PopTorch 3.4's, entry by entry."""
from __future__ import annotations

import inspect
import sys
from typing import Any, List

import pytest

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.ipu import contract
from ipu_lean.ipu.emulator import option_groups

pytestmark = pytest.mark.pod

# Not offered: graph networks' ops, printing, profiling, saved executables' helpers and PopTorch's own internals.
ABSENT = {"poptorch.poptorchAtExit", "poptorch.ctc_beam_search_decoder", "poptorch.fps", "poptorch.nearest",
          "poptorch.registerCustomArgParser", "poptorch.registerGeometricCustomArgParsers", "poptorch.ICustomArgParser",
          "poptorch.module_repr", "poptorch.print", "poptorch.testing.allclose", "poptorch.accessAttributes",
          "poptorch.getIpuTensorId", "poptorch.profiling.Channel"}
STANDARD = {"abc", "collections", "contextlib", "copy", "copyreg", "datetime", "enum", "functools", "gc", "inspect", "itertools",
            "json", "logging", "math", "numbers", "operator", "os", "pathlib", "queue", "sys", "threading", "time", "types",
            "typing", "weakref"}
GROUPS = ("Training", "Precision", "TensorLocations", "Distributed", "Jit", "_Popart")


def find(name: str) -> Any:
    target: Any = poptorch
    for part in name.split(".")[1:]:
        target = getattr(target, part)
    return target


def shape(signature: inspect.Signature) -> List[Any]:
    return [(p.name, p.kind, p.default is not p.empty) for p in signature.parameters.values() if p.name != "self"]


def check_signature(name: str, function: Any) -> None:
    theirs, ours = contract.signature(name), inspect.signature(function)
    assert shape(ours) == shape(theirs), name
    for parameter in theirs.parameters.values():
        if parameter.default is not parameter.empty:
            expected = eval(parameter.default, {"__builtins__": {}}, dict(vars(poptorch), enums=poptorch))
            assert ours.parameters[parameter.name].default == expected, f"{name}: {parameter.name}"


@pytest.mark.parametrize("name", [name for name in contract.functions() if name not in ABSENT])
def test_functions(name: str) -> None:
    check_signature(name, find(name))


@pytest.mark.parametrize("name", [name for name in contract.classes() if name not in ABSENT])
def test_classes(name: str) -> None:
    target = find(name)
    if contract.load()["classes"][name].get("init"):
        check_signature(name, target.__init__)
    for method in contract.methods(name):
        if method in vars(object) and method not in vars(target):
            continue
        check_signature(f"{name}.{method}", getattr(target, method))
    for entry in contract.properties(name):
        assert isinstance(inspect.getattr_static(target, entry.split(" ")[0]), property), f"{name}.{entry}"


@pytest.mark.parametrize("group", GROUPS)
def test_option_groups(group: str) -> None:
    target = getattr(poptorch.Options(), group)
    for method in contract.methods(f"poptorch.Options.{group}"):
        check_signature(f"poptorch.Options.{group}.{method}", getattr(type(target), method))


@pytest.mark.parametrize("name", [name for name in contract.load()["enums"] if not name.startswith("poptorch._")])
def test_enums(name: str) -> None:
    target = find(name)
    assert {member.name: member.value for member in target} == contract.enum_members(name)
    bases = contract.load()["enums"][name]["bases"]
    assert [f"enum.{base.__name__}" for base in target.__bases__] == bases


def test_nothing_public_is_made_up() -> None:
    known = {name.split(".")[1] for kind in ("functions", "classes", "enums", "reexports") for name in contract.load()[kind]}
    known |= {"optim", "annotations"}
    submodules = {name for name, value in vars(poptorch).items() if inspect.ismodule(value)}
    made_up = [name for name in vars(poptorch) if not name.startswith("_") and name not in known | submodules]
    assert made_up == []


def test_the_emulator_stands_alone() -> None:
    """It could be published without the rest: torch, the standard library, and its own modules."""
    import ast
    from pathlib import Path

    allowed = {"torch", "__future__"} | getattr(sys, "stdlib_module_names", STANDARD)
    for path in Path(poptorch.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert all(name.split(".")[0] in allowed for name in names), (path.name, names)


def test_groups_are_private_classes_of_options() -> None:
    assert isinstance(poptorch.Options().Training, option_groups._TrainingOptions)
