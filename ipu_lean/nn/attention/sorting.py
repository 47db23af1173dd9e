"""Putting tokens in the order of their buckets, stably: by a sort, or by counting where a sort is not stable.

PopTorch's argsort is neither stable nor cheap. Counting needs what it has: comparisons, cumulative sums, a scatter. One pass over
all buckets would hold seq x buckets numbers, so large bucket numbers are sorted digit by digit, the lowest first, each pass
stable (a radix sort): seq x base numbers a pass.
"""

from __future__ import annotations

from typing import Tuple

import torch

from ipu_lean.errors import ConfigError
from ipu_lean.nn.attention import host

METHODS = ("sort", "counting")
WIDEST = 32  # digits above this are split


def bucket_order(buckets: torch.Tensor, count: int, method: str = "sort") -> Tuple[torch.Tensor, torch.Tensor]:
    """(order, undo), int64 in the shape of `buckets` `[..., seq]`.

    order: `order[i]` is the token at place i, by bucket, within a bucket by position. undo: the place of each token.

    Args:
        buckets: int64, from 0 to count - 1.
        method: `sort` or `counting`; both give the same.
    """
    if method not in METHODS:
        raise ConfigError(f"the order of buckets is found by {' or '.join(METHODS)}", value=method)
    with torch.no_grad():
        if method == "sort":
            order = host.stable_order(buckets, count) if host.usable(buckets) else buckets.sort(dim=-1, stable=True)[1]
            return order, inverse(order)
        return _by_counting(buckets, count)


def inverse(order: torch.Tensor, method: str = "sort") -> torch.Tensor:
    """The inverse of permutations `[..., seq]`."""
    places = _places(order if method == "sort" else order.float())
    return torch.zeros_like(places).scatter(-1, order, places).long()


def digits(count: int) -> Tuple[int, int]:
    """(passes, base): the fewest digits to a base of at most WIDEST that tell `count` buckets apart, and the least such base."""
    passes = 1
    while WIDEST**passes < count:
        passes += 1
    base = max(2, int(round(count ** (1.0 / passes))) - 1)
    while base**passes < count:
        base += 1
    return passes, base


def _by_counting(buckets: torch.Tensor, count: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """All in float32, whose integers are exact below 2^24: PopTorch's integer division rounds as it likes, its integer cumulative
    sums are float32 anyway, and its scatter is tested with floats only.
    """
    passes, base = digits(count)
    rest = buckets.float()
    order = _places(rest)
    for number in range(passes):
        higher = torch.floor((rest + 0.5) / base) if number < passes - 1 else torch.zeros_like(rest)
        digit = rest - higher * base
        slots = _slots(digit if number == 0 else torch.gather(digit, -1, order.long()), base).long()
        order, rest = torch.zeros_like(rest).scatter(-1, slots, order), higher
    order = order.long()
    return order, slots if passes == 1 else inverse(order, "counting")


def _places(like: torch.Tensor) -> torch.Tensor:
    """0, 1, … along the last dimension, in the shape of `like`."""
    return torch.arange(like.shape[-1], device=like.device, dtype=like.dtype).expand(like.shape)


def _slots(digit: torch.Tensor, base: int) -> torch.Tensor:
    """Where each entry of `[..., seq]` goes: after all smaller ones and after the equal ones before it."""
    values = torch.arange(base, device=digit.device, dtype=digit.dtype)
    hits = (digit.unsqueeze(-2) == values.unsqueeze(-1)).to(digit.dtype)  # [..., base, seq]
    upto = _running(hits)
    totals = upto[..., -1:]
    smaller = totals.cumsum(-2) - totals
    return (hits * (upto + smaller)).sum(-2) - 1


def _running(hits: torch.Tensor) -> torch.Tensor:
    """Cumulative sums along the last dimension, in two levels: on an IPU the cost of one grows with the square of its length."""
    seq = hits.shape[-1]
    width = next(width for width in range(int(seq**0.5), 0, -1) if seq % width == 0)
    if width == 1:
        return hits.cumsum(-1)
    within = hits.view(*hits.shape[:-1], seq // width, width).cumsum(-1)
    totals = within[..., -1]
    return (within + (totals.cumsum(-1) - totals).unsqueeze(-1)).reshape(hits.shape)
