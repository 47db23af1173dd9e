"""Which rows of a global batch a process takes."""

from __future__ import annotations

import numpy as np
import pytest

from ipu_lean.config import make_config
from ipu_lean.errors import RunError
from ipu_lean.train.world import World

pytestmark = pytest.mark.pod


def test_rows_are_dealt_by_replica() -> None:
    config = make_config(batch={"micro": 2, "accumulation": 3, "replicas": 4}, mup={"base_width": 64})
    rows = config.batch.global_batch
    batch = (np.arange(rows).reshape(rows, 1), 100 + np.arange(rows).reshape(rows, 1))
    whole = batch[0].reshape(3, 4, 2)
    for size in (1, 2, 4):
        share = 4 // size
        for rank in range(size):
            tokens, labels = World(rank, size).rows(batch, config)
            expected = [whole[a, r, m] for a in range(3) for r in range(rank * share, (rank + 1) * share) for m in range(2)]
            assert tokens.flatten().tolist() == expected
            assert np.array_equal(labels, tokens + 100)


def test_a_world_of_one_needs_no_group() -> None:
    world = World()
    assert world.first and world.sum([1.5, 2]) == [1.5, 2.0] and world.any(True) and not world.any(False)
    assert world.broadcast("x") == "x" and world.gather(3) == [3]
    world.barrier()
    world.agree(None)
    with pytest.raises(RunError, match="full"):
        world.agree(RunError("full"))
