"""The chunked loss in two processes: gradients are the mean of what each process has alone."""

from __future__ import annotations

import os

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ipu_lean.nn import Embedding, TiedReadout, chunked_cross_entropy

pytestmark = pytest.mark.pod


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = Embedding(11, 6, std=1.0)
        self.readout = TiedReadout(self.embedding) if tied else nn.Linear(6, 11)
        self.spare = nn.Linear(2, 2)  # never used

    def forward(self, tokens):
        return chunked_cross_entropy(self.embedding(tokens), tokens.roll(1), self.readout, 3)[0]


def tokens_of(rank):
    return torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(rank))


def worker(rank, path):
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{path}/meet", rank=rank, world_size=2)
    for tied in (True, False):
        model = Model(tied)
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)  # it must outlive its backward pass
        wrapped(tokens_of(rank)).backward()
        if rank == 0:
            torch.save(gradients(model), os.path.join(path, f"gradients-{tied}"))
    distributed.barrier()
    distributed.destroy_process_group()


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_two_processes(tmp_path):
    mp.spawn(worker, (str(tmp_path),), nprocs=2)
    for tied in (True, False):
        got = torch.load(tmp_path / f"gradients-{tied}")
        alone = []
        for rank in range(2):
            model = Model(tied)
            model(tokens_of(rank)).backward()
            alone.append(gradients(model))
        assert {name for name, gradient in got.items() if gradient.any()} == set(alone[0])
        for name, gradient in alone[0].items():
            mean = (gradient + alone[1][name]) / 2
            assert mean.norm() > 0 and torch.allclose(got[name], mean, rtol=1e-6, atol=1e-8), name
