"""Execution order of a stack whose blocks may be shared, and its division into checkpoint segments."""
from __future__ import annotations

import contextlib
from typing import ContextManager, Dict, List, Sequence

from torch import nn

from ipu_lean.errors import ConfigError

from .surroundings import cast_cache


class Visits:
    """Which block runs when, as numbers: a block that runs several times is registered once, so `state_dict` has it once.

    Args:
        blocks: in execution order, repeats allowed.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        if not blocks:
            raise ConfigError("a stack needs at least one block", key="model.depth", value=0)
        place: Dict[int, int] = {}
        self._first: List[nn.Module] = []
        self.order: List[int] = []
        for block in blocks:
            if id(block) not in place:
                place[id(block)] = len(self._first)
                self._first.append(block)
            self.order.append(place[id(block)])

    def unique(self) -> nn.ModuleList:
        """Each block once, in order of first visit. Only the numbers stay here, so that copies of the stack stay whole."""
        blocks, self._first = nn.ModuleList(self._first), []
        return blocks

    def casts(self) -> ContextManager[None]:
        """Around a recorded run: autocast keeps no casts of weights where each weight is used once.

        Its cache would hold a 16-bit copy of every weight until the forward pass ends, which grows with depth and serves nobody.
        """
        return cast_cache(False) if len(set(self.order)) == len(self.order) else contextlib.nullcontext()

    def of(self, blocks: nn.ModuleList) -> List[nn.Module]:
        """`blocks` (as registered now: compiled, wrapped or replaced ones too) in execution order."""
        registered = list(blocks)
        return [registered[i] for i in self.order]


def layers_of(block: nn.Module) -> int:
    """Layers in a block: a layer is an attention and FFN pair, so two branches; a lone branch counts as one."""
    return max(1, len(block.branches) // 2)


def segments(blocks: Sequence[nn.Module], every: int) -> List[List[nn.Module]]:
    """Runs of blocks with at least `every` layers each (the last may be shorter); blocks are not cut."""
    found: List[List[nn.Module]] = [[]]
    layers = 0
    for block in blocks:
        if layers >= every:
            found.append([])
            layers = 0
        found[-1].append(block)
        layers += layers_of(block)
    return found
