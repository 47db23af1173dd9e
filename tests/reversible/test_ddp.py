"""DistributedDataParallel over two gloo processes: each rank's gradient is the mean of what the ranks have alone."""
from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from tests.reversible.ranks import on_two_ranks
from tests.reversible.toys import Wide, assert_same, collect, data, loss_of, residual, reversible

pytestmark = pytest.mark.pod
CASES = [
    (kind, shared, mode)
    for kind in ("invert", "checkpoint", "residual", "momentum", "pieces")
    for shared in (False, True)
    for mode in ("default", "find_unused_parameters", "static_graph")
    if not (kind == "residual" and shared)
]


def build(kind: str, shared: bool):
    if kind == "residual":
        return residual("checkpoint", dropout=0.2)
    if kind == "momentum":
        options = {"coupling": "momentum", "input": "zeros", "output": "gate"}
        return reversible("invert", layers=2, visits=[0, 1, 0, 1] if shared else None, dropout=0.2, **options)
    if kind == "pieces":
        visits = [0, 1, 0, 1] if shared else None
        return reversible("invert", layers=2, visits=visits, dropout=0.2, make=lambda: Wide(3, sums=True, dropout=0.2))
    return reversible(kind, layers=2, visits=[0, 1, 0, 1] if shared else None, dropout=0.2)


def local_gradients(stack, rank: int, accumulate: bool):
    """Gradients of this rank: of one batch, or of two of which the first is not synchronised (a static graph cannot do that)."""
    torch.manual_seed(20 + rank)
    if accumulate:
        with getattr(stack, "no_sync", torch.enable_grad)():
            loss_of(stack(data(seed=rank))).backward()
    loss_of(stack(data(seed=rank + 10))).backward()
    return collect(stack)


def run_case(case, rank: int, folder: str) -> None:
    kind, shared, mode = case
    options = {} if mode == "default" else {mode: True}
    wrapped = DistributedDataParallel(build(kind, shared), **options)
    found = local_gradients(wrapped, rank, accumulate=mode != "static_graph")
    torch.save({name[len("module.") :]: g for name, g in found.items()}, f"{folder}/{'-'.join(map(str, case))}-{rank}")


def worker(rank: int, folder: str) -> None:
    on_two_ranks(rank, folder, [lambda case=case: run_case(case, rank, folder) for case in CASES])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs all cases in one pair of processes."""
    path = str(tmp_path_factory.mktemp("ddp"))
    mp.spawn(worker, args=(path,), nprocs=2, join=True)
    return path


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_two_ranks(case, folder):
    kind, shared, mode = case
    alone = []
    for rank in range(2):
        stack = build(kind, shared)
        stack.engine = "store"
        alone.append(local_gradients(stack, rank, accumulate=mode != "static_graph"))
    mean = {name: (alone[0][name] + alone[1][name]) / 2 for name in alone[0]}
    for rank in range(2):
        assert_same(mean, torch.load(f"{folder}/{'-'.join(map(str, case))}-{rank}"), 1e-10)
