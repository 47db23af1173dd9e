"""Which modules a coordinate check watches, and how their results are taken out of a forward pass."""

from __future__ import annotations

import re
from typing import Any, Dict, List, NamedTuple

import torch
from torch import nn

from ipu_lean.mup.figures import BRANCH, HIDDEN, OUTPUT, STREAM


class Point(NamedTuple):
    """A place that is watched: `module`'s output, or its input if `before`."""

    name: str
    module: nn.Module
    role: str
    before: bool = False


def points(model: nn.Module) -> List[Point]:
    """The embedding, every branch of every layer (or the layer, where it has none), what enters the final norm, the norm, the
    readout: from the model's own `blocks()`. A shared layer is named by its first visit.
    """
    found: List[Point] = []
    seen = set()
    for block in model.blocks():  # type: ignore[operator]
        parts = list(getattr(block.module, "branches", [block.module]))
        if block.kind == "norm":
            found.append(Point("stack", block.module, STREAM, before=True))
        for number, part in enumerate(parts):
            if id(part) in seen:
                continue
            seen.add(id(part))
            role = OUTPUT if block.kind == "head" else BRANCH if hasattr(block.module, "branches") else HIDDEN
            found.append(Point(_name(block.name, part, number, parts), part, role))
    return found


def _name(block: str, part: nn.Module, number: int, parts: List[nn.Module]) -> str:
    """`layer0.attention`; numbered where a block has several branches of one kind."""
    if len(parts) == 1:
        return block
    kind = re.sub(r"Branch$", "", type(part).__name__)
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind).lower()
    same = [other for other in parts if type(other) is type(part)]
    return f"{block}.{kind}" if len(same) == 1 else f"{block}.{kind}{sum(other is not part for other in same[: number + 1])}"


class Watch:
    """Hooks that collect what the points give in one forward pass, in order of execution.

    `names` and `roles` are of the tensors last taken; `take()` empties the collection. A module that runs several times
    (shared layers) appears as `name (visit 2)`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.points = points(model)
        self.names: List[str] = []
        self._roles: Dict[str, str] = {}
        self._seen: List[torch.Tensor] = []
        self._handles = [
            point.module.register_forward_pre_hook(self._input(point))
            if point.before
            else point.module.register_forward_hook(self._output(point))
            for point in self.points
        ]

    def _input(self, point: Point) -> Any:
        return lambda module, inputs: self._keep(point, inputs[0])

    def _output(self, point: Point) -> Any:
        return lambda module, inputs, output: self._keep(point, output)

    def _keep(self, point: Point, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            visits = sum(name == point.name or name.startswith(point.name + " (visit ") for name in self.names)
            name = point.name if not visits else f"{point.name} (visit {visits + 1})"
            self._roles[name] = point.role
            self.names.append(name)
            self._seen.append(tensor)

    def start(self) -> None:
        """Forget what was collected."""
        # Emptied, not replaced: PopTorch calls a shallow copy of the module that holds this, which shares the lists.
        self.names.clear()
        self._seen.clear()

    def take(self) -> List[torch.Tensor]:
        """What was collected since `start`, in the order of `names`."""
        return list(self._seen)

    def role(self, name: str) -> str:
        """As in `Coordinate`."""
        return self._roles[name]

    def release(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
