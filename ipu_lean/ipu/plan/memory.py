"""Bytes on each stage and on each IPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Tuple

from ipu_lean.ipu.plan.machine import MEMORY, verdict
from ipu_lean.ipu.plan.pipeline import Stage, route
from ipu_lean.ipu.plan.workload import Workload

ITEMS = ("weights", "accumulators", "state", "stash", "live", "logits", "streams", "temporaries")
"""What an IPU holds: weights; accumulated gradients; optimizer state on chip; micro-batches in flight; what one layer (or stage)
computes again and needs for its gradients; logits with softmax and gradient; inputs from the host; temporaries of products."""
_LABEL_BYTES = 4  # int32


@dataclass(frozen=True)
class StageMemory:
    """One stage's bytes by item (temporaries belong to the IPU), and the parameters that stand on its IPU because of it."""

    stage: Stage
    parameters: int
    items: Dict[str, int]


@dataclass(frozen=True)
class IpuMemory:
    """One IPU's bytes by item; `offchip`: optimizer state that it keeps in streaming memory."""

    ipu: int
    layers: int
    parameters: int
    items: Dict[str, int]
    offchip: int

    @property
    def before(self) -> int:
        """Bytes before the temporaries of matrix products."""
        return sum(self.items.values()) - self.items["temporaries"]

    @property
    def after(self) -> int:
        """Bytes in all."""
        return sum(self.items.values())

    @property
    def shares(self) -> Tuple[float, float]:
        """`before` and `after` as shares of the IPU's memory."""
        return self.before / MEMORY, self.after / MEMORY

    @property
    def verdict(self) -> str:
        """fits, tight or no."""
        return verdict(*self.shares)


def boundary_bytes(workload: Workload) -> int:
    """What passes from layer to layer, for one micro-batch."""
    return workload.tokens * workload.network.boundary * workload.element


def layer_bytes(workload: Workload, number: int = 0) -> int:
    """What a layer needs for its gradients: with 16 bits, full attention and the usual feed-forward, 34 d + 5 h s bytes a token
    (Korthikanti et al. 2022), scores written out. Local and hashed attention: chunked.py.
    """
    network, size = workload.network, workload.element
    chunked = network.chunked[number] if network.chunked else None
    if chunked is not None:
        kept = chunked.kept(size) + size * network.working
        return workload.tokens * (max(chunked.working(size), kept) + network.masks)
    scores = network.heads * network.seq * (2 * size + 1)
    return workload.tokens * (size * network.saved + network.masks + scores)


def walked_bytes(workload: Workload, number: int) -> int:
    """What a step that walks a reversible stack backwards itself holds beside both streams while it derives a layer, one branch
    after the other: three matrices of scores in float32 (the softmax, its gradient and their product), or the feed-forward's.
    """
    network, size = workload.network, workload.element
    chunked = network.chunked[number] if network.chunked else None
    written = 12 * network.heads * network.seq + 4 * size * network.inner
    attention = chunked.working(size) if chunked is not None else written
    return workload.tokens * (max(attention, network.fed) + network.around)


def stage_memory(workload: Workload) -> List[StageMemory]:
    """All stages in order."""
    return [_stage(workload, stage) for stage in route(workload)]


def ipu_memory(workload: Workload) -> List[IpuMemory]:
    """All IPUs of a replica. Stages of one IPU follow each other, so of what is alive while they run, the largest counts."""
    stages = stage_memory(workload)
    found = []
    for ipu in range(workload.ipus):
        here = [row for row in stages if row.stage.ipu == ipu]
        items = {name: sum(row.items[name] for row in here) for name in ITEMS[:-1]}
        items["live"] = max((row.items["live"] for row in here), default=0)
        items["temporaries"] = int(workload.proportion(ipu) * MEMORY)
        parameters = sum(row.parameters for row in here)
        offchip = _state(workload, parameters) if workload.state_offchip else 0
        found.append(IpuMemory(ipu, sum(len(row.stage.layers) for row in here), parameters, items, offchip))
    return found


def _stage(workload: Workload, stage: Stage) -> StageMemory:
    network, last = workload.network, len(workload.network.layers) - 1
    parameters = sum(network.layers[number] for number in stage.layers)
    parameters += network.embedding if stage.embeds else 0
    parameters += network.norm if last in stage.layers else 0
    parameters += network.head if stage.heads else 0
    training = workload.training
    items = {
        "weights": parameters * workload.element,
        "accumulators": parameters * workload.accumulator if training else 0,
        "state": _state(workload, parameters) if training and not workload.state_offchip else 0,
        "stash": _stash(workload, stage) if training else 0,
        "live": _live(workload, stage, parameters) if training else 0,
        "logits": _beyond_the_walk(workload, stage) if stage.heads else 0,
        "streams": _streams(workload, stage),
    }
    return StageMemory(stage, parameters, items)


def _state(workload: Workload, parameters: int) -> int:
    shares = workload.replicas if workload.state_sharded else 1
    return -(-parameters * sum(workload.moments) // shares)


def _stash(workload: Workload, stage: Stage) -> int:
    """What a micro-batch leaves in a stage (what enters it, and with checkpoints what leaves each block), times its depth."""
    network, border = workload.network, boundary_bytes(workload)
    if not stage.layers:  # gradients of an embedding need its tokens only, those of positions nothing
        return workload.tokens * network.hidden * workload.element * stage.depth if stage.heads else 0
    if workload.surrogate:  # both streams at the end, which the walk back turns into their own inputs, and orders of tokens
        orders = sum(network.chunked[number].order for number in stage.layers if network.chunked and network.chunked[number])
        return border + workload.tokens * orders
    enters = workload.tokens * network.entry * workload.element if network.entry and 0 in stage.layers else border
    blocks = -(-len(stage.layers) // network.block) if workload.every_layer and workload.recomputed else 0
    return (enters + blocks * border) * stage.depth


def _live(workload: Workload, stage: Stage, parameters: int) -> int:
    if not stage.layers:
        return 0
    if workload.surrogate:  # one branch's derivative, and the gradients until the update
        return _walked(workload, stage) + parameters * workload.element
    each, block = [layer_bytes(workload, number) for number in stage.layers], workload.network.block
    largest = max(sum(each[first : first + block]) for first in range(0, len(each), block))
    moving = workload.tokens * workload.network.moving * workload.element
    return (largest if workload.every_layer and workload.recomputed else sum(each)) + moving


def _walked(workload: Workload, stage: Stage) -> int:
    return max([0, *(walked_bytes(workload, number) for number in stage.layers)])


def _beyond_the_walk(workload: Workload, stage: Stage) -> int:
    """Logits; of a step that walks backwards itself what they take beyond that, because they are gone when it begins."""
    logits = _logits(workload)
    return max(0, logits - _walked(workload, stage)) if workload.surrogate and workload.training else logits


def _logits(workload: Workload) -> int:
    alive = workload.labels if workload.logit_tokens is None else min(workload.logit_tokens, workload.labels)
    each = workload.logit_bytes if workload.training else workload.element
    return alive * workload.network.vocab * each


def _streams(workload: Workload, stage: Stage) -> int:
    """Inputs of the host: tokens stay until the embedding's gradient is taken, labels arrive where the loss is."""
    tokens = workload.tokens * workload.network.input_bytes * max(1, stage.depth) if stage.embeds else 0
    return tokens + (workload.labels * _LABEL_BYTES if stage.heads else 0)
