"""DistributedDataParallel over two gloo processes: each rank's gradient of a Reformer is the mean of both alone."""

from __future__ import annotations

import pytest
import torch
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from ipu_lean.models import TrainStep
from tests.models.common import tokens_for
from tests.models.reformer_common import reformer
from tests.reversible.ranks import on_two_ranks

pytestmark = pytest.mark.pod


def backward(step, model, rank):
    torch.manual_seed(rank)
    step(*tokens_for(model, seq=26, seed=rank))[0].backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def run_case(rank, folder):
    model = reformer(dropout=0.3).train()
    wrapped = DistributedDataParallel(TrainStep(model))
    model.redraw(2)
    torch.save(backward(wrapped, model, rank), f"{folder}/{rank}")


def worker(rank, folder):
    on_two_ranks(rank, folder, [lambda: run_case(rank, folder)])


def test_two_ranks(tmp_path):
    mp.spawn(worker, args=(str(tmp_path),), nprocs=2, join=True)
    alone = []
    for rank in range(2):
        model = reformer(dropout=0.3).train()
        model.set_engine("store")
        model.redraw(2)
        alone.append(backward(TrainStep(model), model, rank))
    for rank in range(2):
        found = torch.load(f"{tmp_path}/{rank}")
        for name, value in alone[0].items():
            mean = (value + alone[1][name]) / 2
            assert mean.norm() > 0 and (found[name] - mean).norm() < 1e-10 * mean.norm(), name
