"""Loss, accuracy and perplexity over whole validation sets: every label counts exactly once, whatever the batch shape."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterator, List, Optional

import numpy as np

from ipu_lean.train.engines.protocol import Batch, Engine
from ipu_lean.train.tasks import Task
from ipu_lean.train.world import World

Metrics = Dict[str, Any]


def evaluate_set(engine: Engine, task: Task, name: str, world: World, limit: Optional[int] = None) -> Metrics:
    """{loss, accuracy, perplexity, tokens} of one set.

    Calls (of `engine.eval_micro_batches` micro-batches) are dealt to the processes in turn; a process that gets none in the last
    round joins with labels that count nothing, because a sharded forward pass needs all of them. Sums are kept in float64.

    Args:
        limit: global batches read at most; None reads everything.
    """
    empty = task.blank(task.config.batch.micro * engine.eval_micro_batches)
    total = np.zeros(3)
    mine, seen = None, 0
    for index, batch in enumerate(_calls(task, name, limit, engine.eval_micro_batches)):
        seen = index + 1
        if index % world.size == world.rank:
            mine = batch
        if seen % world.size == 0:
            total += engine.eval_step(mine if mine is not None else empty)[:3]
            mine = None
    if seen % world.size:
        total += engine.eval_step(mine if mine is not None else empty)[:3]
    loss_sum, correct, counted = world.sum(total.tolist())
    return summarise(loss_sum, correct, counted)


def _calls(task: Task, name: str, limit: Optional[int], size: int) -> Iterator[Batch]:
    """The set in calls of `size` micro-batches, the last one filled up with rows that count nothing. What is counted depends on
    the global batch only, not on the device.
    """
    batch_config = task.config.batch
    micro = batch_config.micro
    wanted = None if limit is None else limit * batch_config.accumulation * batch_config.replicas
    held: List[Batch] = []
    for batch in task.eval_batches(name, micro, wanted):
        held.append(batch)
        if len(held) == size:
            yield _joined(held)
            held = []
    if held:
        yield _joined([*held, task.blank(micro * (size - len(held)))])


def _joined(batches: List[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    return np.concatenate([inputs for inputs, _ in batches]), np.concatenate([labels for _, labels in batches])


def summarise(loss_sum: float, correct: float, tokens: float) -> Metrics:
    """Means from sums; a perplexity beyond float64 is infinite."""
    loss = loss_sum / tokens if tokens else math.nan
    perplexity = math.exp(loss) if loss < 709.0 else math.inf
    return {"loss": loss, "accuracy": correct / tokens if tokens else math.nan, "perplexity": perplexity, "tokens": int(tokens)}


def evaluate_all(engine: Engine, task: Task, world: World) -> Dict[str, Metrics]:
    """`evaluate_set` for each validation set, in order, reading `train.eval_batches` global batches of each."""
    limit = task.config.train.eval_batches
    return {name: evaluate_set(engine, task, name, world, limit) for name in task.validation_names}
