"""Loss, accuracy and perplexity over whole validation sets: every token is a label exactly once, whatever the batch shape."""

from __future__ import annotations

import math
from typing import Any, Dict, Mapping, Optional

import numpy as np

from ipu_lean.config import Config
from ipu_lean.data import IGNORED, TokenFile, eval_batches
from ipu_lean.train.engines.protocol import Engine
from ipu_lean.train.world import World

Metrics = Dict[str, Any]


def evaluate_set(engine: Engine, tokens: TokenFile, config: Config, world: World, limit: Optional[int] = None) -> Metrics:
    """{loss, accuracy, perplexity, tokens} of one set.

    Micro-batches are dealt to the processes in turn; a process that gets none in the last round joins with labels that count
    nothing, because a sharded forward pass needs all of them. Sums are kept in float64.

    Args:
        limit: global batches read at most; None reads everything.
    """
    micro, seq = config.batch.micro, config.model.seq
    batches = None if limit is None else limit * config.batch.accumulation * config.batch.replicas
    empty = (np.zeros((micro, seq), np.int32), np.full((micro, seq), IGNORED, np.int32))
    total = np.zeros(3)
    mine, seen = None, 0
    for index, batch in enumerate(eval_batches(tokens, seq, micro, batches)):
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


def summarise(loss_sum: float, correct: float, tokens: float) -> Metrics:
    """Means from sums; a perplexity beyond float64 is infinite."""
    loss = loss_sum / tokens if tokens else math.nan
    perplexity = math.exp(loss) if loss < 709.0 else math.inf
    return {"loss": loss, "accuracy": correct / tokens if tokens else math.nan, "perplexity": perplexity, "tokens": int(tokens)}


def evaluate_all(engine: Engine, sets: Mapping[str, TokenFile], config: Config, world: World) -> Dict[str, Metrics]:
    """`evaluate_set` for each named set, in order, reading `train.eval_batches` global batches of each."""
    return {name: evaluate_set(engine, tokens, config, world, config.train.eval_batches) for name, tokens in sets.items()}
