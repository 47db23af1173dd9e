"""Blocks of the model to IPUs, from outside: hooks on modules, which the model's code does not know of.

The path of a micro-batch is embedding, layers, final norm, readout and loss. PopTorch starts a stage wherever the IPU changes, so
a readout that shares the embedding's matrix, and therefore its IPU, adds one.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Tuple

from torch import nn

from ipu_lean.config import Config
from ipu_lean.config.layout import Layout, layout, stages
from ipu_lean.errors import ConfigError


@dataclass(frozen=True)
class Row:
    """One block: `ipu` and `stage` (both from 0) where it runs, parameters that it adds to that IPU, names it shares with."""

    name: str
    kind: str
    ipu: int
    stage: int
    parameters: int
    ties: Tuple[str, ...] = ()


@dataclass
class Placement:
    """Where each block went.

    Attributes:
        rows: the allocation, in execution order. path: IPUs in the order of the stages.
        stages: F, forward stages of the pipeline; 1 if nothing is pipelined. ipus: IPUs of one replica.
    """

    rows: List[Row]
    path: List[int]
    stages: int
    ipus: int
    _undo: List[Any] = field(default_factory=list)

    @property
    def table(self) -> str:
        """The allocation as text: one line an IPU and stage."""
        lines = [f"{'stage':>5} {'IPU':>4} {'parameters':>12}  blocks"]
        for stage in sorted({row.stage for row in self.rows}):
            here = [row for row in self.rows if row.stage == stage]
            names = _spans([row.name for row in here])
            lines.append(f"{stage:>5} {here[0].ipu:>4} {sum(row.parameters for row in here):>12,}  {names}")
        return "\n".join(lines)

    def remove(self) -> None:
        """Take the hooks off the model again."""
        while self._undo:
            self._undo.pop()()


def place(model: nn.Module, config: Config, poptorch: Any) -> Placement:
    """Mark `model.blocks()` with their IPUs for the next trace.

    Args:
        model: has `blocks()`; each block is called as a module.
        poptorch: the module from `load_poptorch`.
    Raises:
        ConfigError: the layers do not add up, or a weight would be on two IPUs.
    """
    where = layout(config)
    blocks = model.blocks()
    ipus = _ipus_of(blocks, where)
    _check_ties(blocks, ipus)
    rows = _rows(blocks, ipus)
    placement = Placement(rows, where.path, stages(config), where.ipus)
    _separate_tables(blocks, ipus, placement._undo)
    begun = set()
    for row, block in zip(rows, blocks):
        if id(block.module) in begun:
            continue  # a shared layer stands where it stood at its first visit
        begun.add(id(block.module))
        # Blocks of one stage share a name: a new name would begin a new stage on the same IPU.
        poptorch.BeginBlock(block.module, user_id=f"stage{row.stage}", ipu_id=row.ipu)
        placement._undo.append(lambda module=block.module: poptorch.removeBlocks(module))
        if block.kind == "layer" and config.ipu.recompute_checkpoint_every_layer:
            placement._undo.append(_checkpoint(block.module, poptorch).remove)
    return placement


def rows_of(model: nn.Module, config: Config) -> List[Row]:
    """The allocation that `place` would make, without touching the model."""
    blocks = model.blocks()
    return _rows(blocks, _ipus_of(blocks, layout(config)))


def _ipus_of(blocks: Any, where: Layout) -> List[int]:
    """IPU of each block."""
    layer_ipus, place, found = where.layer_ipus, 0, []
    for block in blocks:
        if block.kind == "layer":
            homes = set(layer_ipus[place : place + block.layers])
            if len(homes) != 1:
                raise ConfigError(
                    f"block {block.name} holds layers {place} to {place + block.layers - 1}, which stand on IPUs {sorted(homes)}",
                    key="ipu.layers_per_ipu",
                    value=list(where.layers),
                )
            found.append(homes.pop())
            place += block.layers
        else:
            found.append({"embed": where.embedding, "norm": where.norm, "head": where.head}[block.kind])
    return found


def _check_ties(blocks: Any, ipus: List[int]) -> None:
    home = {block.name: ipu for block, ipu in zip(blocks, ipus)}
    for block in blocks:
        for other in block.ties:
            if home[block.name] != home[other]:
                raise ConfigError(
                    f"{block.name} on IPU {home[block.name]} shares weights with {other} on IPU {home[other]}; a weight cannot "
                    "be on two IPUs",
                    key="ipu.head_ipu" if "head" in (block.name, other) else "ipu.layers_per_ipu",
                    suggestion="put them on one IPU, or do not share",
                )


def _rows(blocks: Any, ipus: List[int]) -> List[Row]:
    rows: List[Row] = []
    seen: Dict[int, bool] = {}
    stage, last = 0, 0
    for block, ipu in zip(blocks, ipus):
        stage, last = stage + (1 if ipu != last else 0), ipu
        fresh = [parameter for parameter in block.module.parameters() if not seen.setdefault(id(parameter), False)]
        seen.update({id(parameter): True for parameter in fresh})
        rows.append(Row(block.name, block.kind, ipu, stage, sum(parameter.numel() for parameter in fresh), block.ties))
    return rows


def _separate_tables(blocks: Any, ipus: List[int], undo: List[Any]) -> None:
    """Give each IPU its own copy of constant tables that layers share (rotary positions): a pipeline cannot read a variable on
    two IPUs (popart:transforms/pipeline.cpp:141). They are no part of the state_dict.
    """
    copies: Dict[Tuple[int, int], nn.Module] = {}
    homes: Dict[int, int] = {}
    for block, ipu in zip(blocks, ipus):
        for owner in list(block.module.modules()):
            for name, child in list(owner.named_children()):
                if next(child.parameters(), None) is not None or next(child.buffers(), None) is None:
                    continue
                if homes.setdefault(id(child), ipu) == ipu:
                    continue
                copy = copies.setdefault((id(child), ipu), deepcopy(child))
                homes[id(copy)] = ipu
                setattr(owner, name, copy)
                undo.append(lambda owner=owner, name=name, child=child: setattr(owner, name, child))


def _checkpoint(module: nn.Module, poptorch: Any) -> Any:
    """What leaves the module is kept for the backward pass; what lies between is computed again."""

    def hook(_: nn.Module, __: Any, output: Any) -> Optional[Any]:
        return poptorch.recomputationCheckpoint(output) if poptorch.isRunningOnIpu() else None

    return module.register_forward_hook(hook)


def _spans(names: List[str]) -> str:
    """`embed, layer0-layer3, head`."""
    layers = [name for name in names if name.startswith("layer")]
    if len(layers) < 3:
        return ", ".join(names)
    first = names.index(layers[0])
    return ", ".join([*names[:first], f"{layers[0]}-{layers[-1]}", *names[first + len(layers) :]])
