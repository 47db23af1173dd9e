"""The way of a micro-batch through the IPUs: stages, how many micro-batches each keeps, and what the pipeline costs.

A stage begins wherever the IPU changes, counted from IPU 0 (Compiler.cpp:1253, CompilerImpl.hpp:261). Of F forward stages, what
stage s computes is read again 2(F-1-s) steps later, so it keeps 2(F-1-s)+1 micro-batches. Training fills 2F-1 stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Tuple

from ipu_lean.ipu.plan.workload import Workload


@dataclass(frozen=True)
class Stage:
    """One stage: `layers` are numbers of layers in execution order; `depth` micro-batches are kept in it (0 in inference)."""

    index: int
    ipu: int
    layers: Tuple[int, ...]
    embeds: bool
    heads: bool
    depth: int


def visits(workload: Workload) -> List[Tuple[int, str]]:
    """(IPU, what stands there) in the order of the forward pass, after a start on IPU 0; layers by their number."""
    layer_ipus = [ipu for ipu, count in enumerate(workload.layers_per_ipu) for _ in range(count)]
    way = [(0, "start"), (workload.embedding_ipu, "embed")]
    if workload.positions_ipu is not None:
        way.append((workload.positions_ipu, "positions"))
    way += [(ipu, str(number)) for number, ipu in enumerate(layer_ipus)]
    return [*way, (layer_ipus[-1], "norm"), (workload.head_ipu, "head")]


def route(workload: Workload) -> List[Stage]:
    """The stages in order; IPUs that run one after another are told apart too, though they form no pipeline."""
    groups: List[Tuple[int, List[str]]] = []
    for ipu, what in visits(workload):
        if not groups or groups[-1][0] != ipu:
            groups.append((ipu, []))
        groups[-1][1].append(what)
    found = []
    for index, (ipu, parts) in enumerate(groups):
        depth = 0 if not workload.training else 2 * (len(groups) - 1 - index) + 1 if workload.pipelined else 1
        layers = tuple(int(part) for part in parts if part.isdigit())
        found.append(Stage(index, ipu, layers, "embed" in parts, "head" in parts, depth))
    return found


def forward_stages(workload: Workload) -> int:
    """F; 1 where nothing is pipelined."""
    return len(route(workload)) if workload.pipelined and workload.ipus > 1 else 1


def minimum_accumulation(forward: int) -> int:
    """Micro-batches that a training pipeline of F forward stages needs."""
    return 2 * forward - 1


def bubble(forward: int, accumulation: int) -> float:
    """Share of an update's time in which a stage waits while the pipeline fills and drains."""
    return (2 * forward - 2) / (accumulation + 2 * forward - 2)
