"""Hashing and sorting on CPU, several times faster than by torch's argmax and sort, with the same result bit for bit
(benchmarks/hashing.py measures both).
"""

from __future__ import annotations

import torch

from ipu_lean._compat import compiling
from ipu_lean.nn.transforms import transformed

_CACHE = 2**20  # bytes of rotated queries that are searched while they are in the second-level cache
_RADIX = 2**15  # NumPy sorts 16-bit integers in linear time


def usable(x: torch.Tensor) -> bool:
    """Whether `x` is numbers in this machine's memory and nobody watches what is done with them (tracers, compilers,
    transforms). A mode that only counts says so (`passive = True`): it is to see what happens without it."""
    if compiling() or torch.jit.is_tracing() or type(x) is not torch.Tensor or x.device.type != "cpu":
        return False
    modes = (torch._C._get_dispatch_stack_at(place) for place in range(torch._C._len_torch_dispatch_stack()))
    return all(getattr(mode, "passive", False) for mode in modes) and not transformed(x)


def tokens_at_once(bytes_each: int) -> int:
    """Tokens whose rotated queries, of so many bytes each, fit in the cache."""
    return max(1, _CACHE // bytes_each)


def nearest_axis(x: torch.Tensor) -> torch.Tensor:
    """Index of the greatest of [x, -x] along the last dimension but one, of equal ones the first; an integer type.

    The greatest value is found first, then the first place where it stands: both run along rows of memory, argmax does not.
    """
    count = x.shape[-2]
    high, low = x.amax(-2, keepdim=True), x.amin(-2, keepdim=True)
    forward = high >= -low
    stands = x == torch.where(forward, high, low)
    from_end = torch.arange(count, 0, -1, dtype=torch.int16 if count < 2**15 else torch.int32)
    first = count - (stands * from_end.unsqueeze(-1)).amax(-2)
    return torch.where(forward.squeeze(-2), first, first + count)


def stable_order(buckets: torch.Tensor, count: int) -> torch.Tensor:
    """`argsort(stable)` along the last dimension of integers below `count`; int64."""
    narrow = buckets.to(torch.int16) if count <= _RADIX else buckets
    return torch.from_numpy(narrow.numpy().argsort(-1, kind="stable"))
