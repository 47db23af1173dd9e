"""What the device computes where it differs from torch's op of the same name. Called by the replayed graph, with autograd on."""
from __future__ import annotations

from typing import Any, Tuple

import torch
from torch.nn import functional as F

REDUCTIONS = ("none", "mean", "sum")  # torch's numbers 0, 1, 2


def identity_loss(x: torch.Tensor, reduction: str) -> torch.Tensor:
    """The marked loss: sum, mean, or the value itself ("none")."""
    if reduction == "sum":
        return x.sum()
    return x.mean() if reduction == "mean" else x


def identity(x: torch.Tensor, *_: Any) -> torch.Tensor:
    """Ops that only inform the compiler: checkpoints, memory proportions, overlaps."""
    return x


def nll_loss(log_probabilities: torch.Tensor, target: torch.Tensor, reduction: int, ignore_index: int
             ) -> Tuple[torch.Tensor, torch.Tensor]:
    """torch's nll_loss_forward, but the mean of a batch of which all is ignored is 0, not NaN (popart nllx.cpp:158-177).

    Args: log_probabilities `[rows, classes]` or `[rows, classes, …]`, target of any integer type.
    Returns: the loss, and the number of rows that count.
    """
    target = target.long()
    if reduction != 1:
        loss = F.nll_loss(log_probabilities, target, ignore_index=ignore_index, reduction=REDUCTIONS[reduction])
        return loss, loss.new_tensor(float(target.numel()))
    count = (target != ignore_index).sum().clamp(min=1).to(log_probabilities.dtype)
    return F.nll_loss(log_probabilities, target, ignore_index=ignore_index, reduction="sum") / count, count


def one_hot(tensor: torch.Tensor, num_classes: int) -> torch.Tensor:
    """`[…] -> […, num_classes]`, integer type kept."""
    return F.one_hot(tensor.long(), num_classes).to(tensor.dtype)


def cumsum(x: torch.Tensor, dim: int, dtype: Any = None) -> torch.Tensor:
    """Integers are summed up in float32, as a convolution with ones, and cast back (ConvolutionOps.cpp:127): exact below 2^24."""
    wanted = dtype or (torch.int64 if not x.is_floating_point() else x.dtype)
    if wanted.is_floating_point:
        return torch.cumsum(x, dim, dtype=wanted)
    return torch.cumsum(x.to(wanted).float(), dim).to(wanted)


def wrap_int32(x: torch.Tensor) -> torch.Tensor:
    """64-bit integers of the host are 32-bit on the device and wrap as such."""
    return x.to(torch.int32).to(torch.int64)


def dynamic_slice(tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int) -> torch.Tensor:
    """`size` entries along `dim` from `start` (a tensor of one integer), every `step`-th."""
    index = start.reshape(()).long() + torch.arange(0, size, step, device=tensor.device)
    return tensor.index_select(dim, index)


def dynamic_update(input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int) -> torch.Tensor:
    """A copy of `input` whose `size` entries along `dim` from `start` are those of `src`."""
    index = start.reshape(()).long() + torch.arange(size, device=input.device)
    return input.index_copy(dim, index, src)
