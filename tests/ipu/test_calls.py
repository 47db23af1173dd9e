"""Every call of PopTorch in this package, bound to PopTorch 3.4's own signatures: a name or keyword that it does not have fails.

Two ways: the source is read (each attribute of the `poptorch` module, options and executors that is mentioned anywhere), and the
code is run against a stand-in that binds the arguments it is really given.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import pytest
from torch import nn

import ipu_lean
from ipu_lean.ipu import contract, make_optimizer, make_options, place
from tests.ipu.helpers import ipu_config, lively

pytestmark = pytest.mark.pod

PACKAGE = Path(ipu_lean.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "emulator" not in path.relative_to(PACKAGE).parts)
OPTIONS, EXECUTOR = "poptorch.Options", "poptorch.PoplarExecutor"
# What a name holds, wherever it is written in this package.
HOLDS = {
    "poptorch": "poptorch",
    "options": OPTIONS,  # in ipu/options.py; elsewhere the word means other things
    "location": "poptorch.TensorLocationSettings",
    "executor": EXECUTOR,
    "evaluator": EXECUTOR,
}
# The emulator's own additions, used by the check that runs on the emulator whatever the device.
EMULATOR_ONLY = {"poptorch.examine"}


def dotted(node: ast.AST) -> str:
    """PopTorch's name of an expression such as `self.poptorch.OutputMode.All` or `options.Training.gradientAccumulation`."""
    names: List[str] = []
    while isinstance(node, ast.Attribute):
        if HOLDS.get(node.attr) and isinstance(node.value, ast.Name) and node.value.id == "self":
            return ".".join([HOLDS[node.attr], *reversed(names)])
        names.append(node.attr)
        node = node.value
    if isinstance(node, ast.Name) and HOLDS.get(node.id):
        return ".".join([HOLDS[node.id], *reversed(names)])
    return ""


def signature_of(name: str) -> inspect.Signature:
    """PopTorch's signature; a class without a constructor of its own has its base's."""
    entry = contract.load()["classes"].get(name, {})
    bases = ["poptorch." + base for base in entry.get("bases", []) if "poptorch." + base in contract.load()["classes"]]
    if entry and not entry.get("init") and bases:
        return signature_of(bases[0])
    return contract.signature(name)


def mentions() -> Iterator[Tuple[str, str, Any]]:
    """(where, PopTorch's name, the call or None) of each mention in the package."""
    for path in FILES:
        room = path.relative_to(PACKAGE).parts
        if room[0] not in ("ipu", "train", "parity", "sweep") and len(room) > 1:
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inner = {id(child.value) for child in ast.walk(tree) if isinstance(child, ast.Attribute)}
        called = {id(call.func): call for call in ast.walk(tree) if isinstance(call, ast.Call)}
        partial = {
            id(call.args[0]): call
            for call in ast.walk(tree)
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "partial" and call.args
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or id(node) in inner:
                continue
            name = dotted(node)
            if name.startswith(OPTIONS) and "poptorch" not in ast.dump(node) and room != ("ipu", "options.py"):
                continue
            if name and name != "poptorch":
                call = called.get(id(node)) or partial.get(id(node))
                yield f"{path.relative_to(PACKAGE)}:{node.lineno}", name, call


FOUND = sorted({(where, name) for where, name, _ in mentions()})


def exists(name: str) -> bool:
    """Whether PopTorch 3.4 has it: a module's name, an enum member, a method, a property, a group of options."""
    data = contract.load()
    if any(name in data[kind] for kind in ("functions", "classes", "enums", "reexports")) or name == "poptorch.optim":
        return True
    owner, _, leaf = name.rpartition(".")
    if owner in data["enums"]:
        return leaf in data["enums"][owner]["members"]
    if owner in ("poptorch.Error", "poptorch.RecoverableError"):
        return leaf in ("message", "type", "location", "recovery_action")
    try:
        return leaf in contract.methods(owner) or leaf in contract.properties(owner)
    except KeyError:
        return False


def test_the_package_mentions_poptorch_in_many_places() -> None:
    names = {name for _, name in FOUND}
    for expected in (
        "poptorch.trainingModel",
        "poptorch.OutputMode.All",
        "poptorch.BeginBlock",
        "poptorch.Options.Training.gradientAccumulation",
        "poptorch.PoplarExecutor.setOptimizer",
        "poptorch.optim.SGD",
        "poptorch.RecoverableError",
    ):
        assert expected in names, expected
    assert len(names) > 35


@pytest.mark.parametrize("where, name", FOUND, ids=[f"{where} {name}" for where, name in FOUND])
def test_each_name_exists_in_poptorch(where: str, name: str) -> None:
    assert exists(name) or name in EMULATOR_ONLY, f"{where}: PopTorch 3.4 has no {name}"


def test_each_call_binds() -> None:
    bound = 0
    for where, name, call in mentions():
        if call is None or name in EMULATOR_ONLY:
            continue
        try:
            signature = signature_of(name)
        except KeyError:
            continue  # errors and properties have none; that they exist is checked above
        arguments = call.args[1:] if getattr(call.func, "id", "") == "partial" else call.args
        starred = any(isinstance(item, ast.Starred) for item in arguments) or any(word.arg is None for word in call.keywords)
        bind = signature.bind_partial if starred or getattr(call.func, "id", "") == "partial" else signature.bind
        given = [None for item in arguments if not isinstance(item, ast.Starred)]
        try:
            bind(*given, **{word.arg: None for word in call.keywords if word.arg})
        except TypeError as error:
            raise AssertionError(f"{where}: {name} {error}") from None
        bound += 1
    assert bound > 35


def test_a_wrong_name_or_keyword_would_be_found() -> None:
    assert not exists("poptorch.Options.numIpus") and not exists("poptorch.OutputMode.Every") and not exists("poptorch.train")
    with pytest.raises(TypeError):
        contract.signature("poptorch.optim.AdamW").bind([], clip=1.0)
    node = ast.parse("self.poptorch.Options().deviceIteration(2)").body[0].value.func.value.func  # type: ignore[attr-defined]
    assert dotted(node) == "poptorch.Options"


class Bound:
    """Something of PopTorch's by name; calling it binds the arguments, and its attributes must exist."""

    def __init__(self, name: str, calls: List[str]) -> None:
        self.__dict__.update(name=name, calls=calls, held={})

    def __getattr__(self, leaf: str) -> Any:
        name = f"{self.name}.{leaf}"
        assert exists(name), f"PopTorch 3.4 has no {name}"
        if self.name in contract.load()["enums"]:
            return leaf
        return self.held.setdefault(leaf, Bound(name, self.calls))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        signature_of(self.name).bind(*args, **kwargs)
        self.calls.append(self.name)
        return args[0] if args and isinstance(args[0], nn.Module) else self


SECTIONS: List[Dict[str, Any]] = [
    {},
    {"optimizer": {"kind": "sgd", "momentum": 0.9}},
    {"optimizer": {"kind": "adam", "weight_decay": 0.0}, "ipu": {"execution": "sharded"}},
    {
        "precision": "fp16-ipu",
        "batch": {"replicas": 2},
        "ipu": {
            "emulate_precision": True,
            "loss_scaling": "auto",
            "partials": "half",
            "matmul_proportion": [0.1, 0.2],
            "optimizer_state_offchip": True,
            "replicated_tensor_sharding": True,
            "executable_cache": "cache",
            "synthetic_data": True,
            "offline_target": "ipu2",
            "engine_options": {"a": "b"},
        },
    },
]


@pytest.mark.parametrize("changes", SECTIONS, ids=range(len(SECTIONS)))
def test_what_is_really_passed_binds(changes: Dict[str, Any]) -> None:
    config = ipu_config(**changes)
    calls: List[str] = []
    stand_in = Bound("poptorch", calls)
    model = lively(config)
    make_options(config, stand_in)
    place(model, config, stand_in)
    make_optimizer(model, config, stand_in)
    assert len(set(calls)) > 10 and any(name.startswith("poptorch.optim.") for name in calls)


def test_no_other_file_imports_poptorch() -> None:
    importing = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            if any(name.split(".")[0] in ("poptorch", "poptorch_core") for name in names):
                importing.append(str(path.relative_to(PACKAGE)))
    assert importing == [str(Path("ipu") / "api.py")]


def test_the_emulator_answers_to_the_same_signatures() -> None:
    from ipu_lean.ipu import emulator

    for name in ("trainingModel", "inferenceModel", "BeginBlock", "identity_loss"):
        wanted = contract.signature(f"poptorch.{name}").parameters
        assert list(inspect.signature(getattr(emulator, name)).parameters) == list(wanted), name
