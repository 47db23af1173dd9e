"""Loss, accuracy and perplexity over whole validation sets: every token is a label exactly once, whatever the batch shape."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterator, List, Mapping, Optional

import numpy as np

from ipu_lean.config import Config
from ipu_lean.data import IGNORED, TokenFile, eval_batches
from ipu_lean.train.engines.protocol import Batch, Engine
from ipu_lean.train.world import World

Metrics = Dict[str, Any]


def evaluate_set(engine: Engine, tokens: TokenFile, config: Config, world: World, limit: Optional[int] = None) -> Metrics:
    """{loss, accuracy, perplexity, tokens} of one set.

    Calls (of `engine.eval_micro_batches` micro-batches) are dealt to the processes in turn; a process that gets none in the last
    round joins with labels that count nothing, because a sharded forward pass needs all of them. Sums are kept in float64.

    Args:
        limit: global batches read at most; None reads everything.
    """
    empty = _empty(config, engine.eval_micro_batches)
    total = np.zeros(3)
    mine, seen = None, 0
    for index, batch in enumerate(_calls(tokens, config, limit, engine.eval_micro_batches)):
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


def _empty(config: Config, micro_batches: int) -> Batch:
    """Rows whose labels count nothing."""
    shape = (config.batch.micro * micro_batches, config.model.seq)
    return np.zeros(shape, np.int32), np.full(shape, IGNORED, np.int32)


def _calls(tokens: TokenFile, config: Config, limit: Optional[int], size: int) -> Iterator[Batch]:
    """The set in calls of `size` micro-batches, the last one filled up with rows that count nothing. What is counted depends on
    the global batch only, not on the device.
    """
    micro = config.batch.micro
    wanted = None if limit is None else limit * config.batch.accumulation * config.batch.replicas
    held: List[Batch] = []
    for batch in eval_batches(tokens, config.model.seq, micro, wanted):
        held.append(batch)
        if len(held) == size:
            yield _joined(held)
            held = []
    if held:
        yield _joined([*held, _empty(config, size - len(held))])


def _joined(batches: List[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    return np.concatenate([tokens for tokens, _ in batches]), np.concatenate([labels for _, labels in batches])


def summarise(loss_sum: float, correct: float, tokens: float) -> Metrics:
    """Means from sums; a perplexity beyond float64 is infinite."""
    loss = loss_sum / tokens if tokens else math.nan
    perplexity = math.exp(loss) if loss < 709.0 else math.inf
    return {"loss": loss, "accuracy": correct / tokens if tokens else math.nan, "perplexity": perplexity, "tokens": int(tokens)}


def evaluate_all(engine: Engine, sets: Mapping[str, TokenFile], config: Config, world: World) -> Dict[str, Metrics]:
    """`evaluate_set` for each named set, in order, reading `train.eval_batches` global batches of each."""
    return {name: evaluate_set(engine, tokens, config, world, config.train.eval_batches) for name, tokens in sets.items()}
