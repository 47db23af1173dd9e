"""What every stage of a traced training step keeps for one micro-batch, and the most that is alive while it takes its gradients.

Counted from the recorded graph, run on shapes at the types that were traced (kept.py). While gradients are taken backwards
through a stretch between two checkpoints, what its earlier operations saved is still there, and of the operation at hand the
gradients of its result and of its operands.
"""
from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Set

from .kept import _RESIDENT, _recomputes, _Run
from .options import Options
from .trace import Trace


class StageKept(NamedTuple):
    """Bytes of one stage (`stage` as the trace numbers it).

    Attributes:
        parameters: bytes of the parameters that are first read here. kept: checkpoints, and what enters from another stage.
        inputs: what enters from the host. live: most alive while gradients of its largest stretch are taken, loss apart.
        loss: the same for the part of the last stretch that holds the loss, a single slice of it.
    """

    stage: int
    ipu: int
    parameters: int
    kept: int
    inputs: int
    live: int
    loss: int


def kept_by_stage(trace: Trace, options: Optional[Options] = None, classes: int = 0) -> List[StageKept]:
    """All stages in order.

    Args:
        options: as `kept_for_backward`; without recomputation nothing is a checkpoint but what enters a stage.
        classes: length of the last dimension of logits, by which slices of the loss are known; they follow one another, so one is
            alive at once.
    """
    run = _Run(trace)
    recomputed = _recomputes(trace, options)
    places = dict(enumerate(trace.recorder.graph.nodes))
    stages: Dict[int, int] = {}
    for node in places.values():
        if node.meta.get("kind") == "op" and not node.meta.get("constant") and node in trace.live:
            stages.setdefault(node.meta["stage"], node.meta["ipu"])
    owners = _owners(run, places)
    return [_stage(run, places, stage, stages[stage], owners, recomputed, classes) for stage in sorted(stages)]


def _owners(run: _Run, places: Dict[int, Any]) -> Dict[int, int]:
    """Stage that first reads each parameter and host input, by storage."""
    found: Dict[int, int] = {}
    for place in sorted(run.reads):
        stage = places[place].meta.get("stage")
        for number in run.reads[place]:
            if stage is not None and run.storages[number].node.meta.get("kind") in ("parameter", "input"):
                found.setdefault(number, stage)
    return found


def _stage(run: _Run, places: Dict[int, Any], stage: int, ipu: int, owners: Dict[int, int], recomputed: bool,
           classes: int) -> StageKept:
    mine = {number for number, owner in owners.items() if owner == stage}
    parameters = sum(run.storages[n].size for n in mine if run.storages[n].node.meta["kind"] == "parameter")
    inputs = sum(run.storages[n].size for n in mine if run.storages[n].node.meta["kind"] == "input")
    entering = run.entering.get(stage, set())
    kept = sum(run.storages[n].size for n in entering | run.marked.get(stage, set()))
    saved = set(run.saved()) - run.checkpoints
    ops = [place for place, node in places.items() if node.meta.get("kind") == "op" and node.meta.get("stage") == stage]
    stretches: Dict[int, List[int]] = {}
    for place in ops:
        stretches.setdefault(run.stretch_of(place) if recomputed else 0, []).append(place)
    live = loss = 0
    for stretch in stretches.values():
        head = [place for place in stretch if any(_is_logits(run, n, classes) for n in _touched(run, place))]
        rest = stretch if not head else [place for place in stretch if place < head[0]]
        live = max(live, _peak(run, rest, saved))
        loss = max(loss, _loss(run, head, classes))
    return StageKept(stage, ipu, parameters, kept, inputs, live, loss)


def _touched(run: _Run, place: int) -> Set[int]:
    return run.makes.get(place, set()) | run.reads.get(place, set())


def _is_logits(run: _Run, number: int, classes: int) -> bool:
    node = run.storages[number].node
    shape = node.meta.get("shape")
    return node.meta.get("kind") not in _RESIDENT and bool(classes) and bool(shape) and shape[-1] == classes


def _peak(run: _Run, stretch: List[int], saved: Set[int]) -> int:
    """Backwards through the stretch: what was saved up to an operation, and gradients as large as its result and its operands."""
    most = alive = 0
    for place in stretch:
        made = run.makes.get(place, set())
        alive += sum(run.storages[number].size for number in made & saved)
        moving = {n for n in _touched(run, place) if run.storages[n].node.meta.get("kind") == "op" and not run._is_constant(n)}
        most = max(most, alive + (sum(run.storages[number].size for number in moving) if made else 0))
    return most


def _loss(run: _Run, head: List[int], classes: int) -> int:
    """Of one slice: the largest logits as they come, and the largest result computed from them with its gradient."""
    sizes: Dict[str, int] = {}
    for place in head:
        for number in run.makes.get(place, set()):
            if _is_logits(run, number, classes):
                op = run.storages[number].node.meta["op"]
                sizes[op] = max(sizes.get(op, 0), run.storages[number].size)
    if not sizes:
        return 0
    return min(sizes.values()) + 2 * max(sizes.values())
