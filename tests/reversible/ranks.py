"""One process of a pair that meets over gloo."""
from __future__ import annotations

import gc
from typing import Callable, Sequence

import torch
import torch.distributed as dist


def on_two_ranks(rank: int, folder: str, cases: Sequence[Callable[[], None]]) -> None:
    """Runs the cases as `rank` of two; the processes meet through a file in `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        for case in cases:
            case()
            # A wrapper that outlives its process group aborts the process at exit, and FSDP's are freed by the collector only.
            gc.collect()
        dist.barrier()  # a rank that leaves early takes the other one's connection along
    finally:
        dist.destroy_process_group()
