"""FSDP over two gloo processes, around the stack, each block or each branch: gradients are the mean over the ranks."""
from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp

from ipu_lean._compat import TORCH
from ipu_lean.reversible import ReversibleBlock
from tests.reversible.ranks import on_two_ranks
from tests.reversible.toys import Attention, FeedForward, assert_same, collect, data, loss_of, reversible

pytestmark = pytest.mark.skipif(TORCH < (2, 2), reason="FSDP needs CUDA before torch 2.2")
UNITS = {"stack": None, "block": {ReversibleBlock}, "branch": {Attention, FeedForward}}
CASES = [(engine, unit, shared) for engine in ("invert", "checkpoint") for unit in UNITS for shared in (False, True)]


def build(engine: str, shared: bool):
    return reversible(engine, layers=2, visits=[0, 1, 0] if shared else None, dropout=0.2)


def backward(stack, rank: int) -> None:
    torch.manual_seed(20 + rank)
    loss_of(stack(data(seed=rank))).backward()


def run_case(case, rank: int, folder: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    engine, unit, shared = case
    policy = None if UNITS[unit] is None else ModuleWrapPolicy(UNITS[unit])
    wrapped = FullyShardedDataParallel(
        build(engine, shared), auto_wrap_policy=policy, use_orig_params=True, device_id=torch.device("cpu")
    )
    backward(wrapped, rank)
    with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
        found = {name.replace("_fsdp_wrapped_module.", ""): p.grad.clone() for name, p in wrapped.named_parameters()}
    if rank == 0:
        torch.save(found, f"{folder}/{'-'.join(map(str, case))}")


def worker(rank: int, folder: str) -> None:
    on_two_ranks(rank, folder, [lambda case=case: run_case(case, rank, folder) for case in CASES])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs all cases in one pair of processes."""
    path = str(tmp_path_factory.mktemp("fsdp"))
    mp.spawn(worker, args=(path,), nprocs=2, join=True)
    return path


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_two_ranks(case, folder):
    engine, _, shared = case
    alone = []
    for rank in range(2):
        stack = build("store", shared)
        backward(stack, rank)
        alone.append(collect(stack))
    mean = {name: (alone[0][name] + alone[1][name]) / 2 for name in alone[0]}
    assert_same(mean, torch.load(f"{folder}/{'-'.join(map(str, case))}"), 1e-10)
