"""The machine, and how full of it published training runs were."""

from __future__ import annotations

from typing import NamedTuple

TILES = 1472  # of a GC200 and of a Bow
TILE_BYTES = 624 * 1024
MEMORY = TILES * TILE_BYTES  # 897 MiB
PODS = (4, 16, 64, 128, 256)
MOST_IPUS = 64  # that one process drives (CompilerImpl.cpp:234)
MATMUL_PROPORTION = 0.6  # PopTorch's, where ipu.matmul_proportion is unset


class Limit(NamedTuple):
    """Shares of an IPU's memory: before the temporaries of matrix products are counted, and after."""

    before: float
    after: float


# The fullest IPUs of the published training runs are at 67.8 % before temporaries and 85.5 % after (BERT-large for SQuAD on 8
# IPUs), as these formulas count them. The rest goes to what they do not count: code, exchange, constants, gradients in flight,
# all-reduce buffers, and tiles that are fuller than the average.
FITS = Limit(0.68, 0.86)
# Nobody published a training run between the two; GPT2-medium on 4 IPUs (70 %, 85 %) lies there. GPT2-large at 1024 tokens on 8
# IPUs (83 %, 98 %) lies beyond, and its recipe takes 16.
TIGHT = Limit(0.80, 0.95)


def verdict(before: float, after: float) -> str:
    """`fits`, `tight` or `no` for one IPU's two shares."""
    for name, limit in (("fits", FITS), ("tight", TIGHT)):
        if before <= limit.before and after <= limit.after:
            return name
    return "no"


def worse(first: str, second: str) -> str:
    """The less favourable of two verdicts."""
    order = ("fits", "tight", "no")
    return max(first, second, key=order.index)
