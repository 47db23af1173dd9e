"""The two searches of LSH attention on CPU, nearest axes and the order of buckets: ours beside torch's argmax and sort.

    python benchmarks/hashing.py               # about ten seconds on one core

One thread, steps in turn, medians of CPU time; 4 heads of 64, one round, the published numbers of buckets. Claim: from 4096
tokens on, both searches together take at most 0.85 of torch's time in float32, and 0.6 in bfloat16.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, Callable, Dict, Sequence

import torch
from _common import Claims, table, timed_in_turn

from ipu_lean.nn.attention import host
from ipu_lean.nn.attention.hashing import bucket_factors

LENGTHS = (1024, 4096, 8192, 16384)
CLAIMED = {"float32": 0.85, "bfloat16": 0.6}


def steps_of(seq: int, dtype: torch.dtype) -> Dict[str, Callable[[], Any]]:
    """Each search by each library, on rotated queries `[1, heads, seq, columns]` and on buckets."""
    factors = bucket_factors(seq, 64)
    generator = torch.Generator().manual_seed(0)
    turned = torch.randn(1, 4, seq, sum(factors) // 2, generator=generator).to(dtype)
    widths = [factor // 2 for factor in factors]
    count = torch.Size(factors).numel()
    buckets = torch.randint(count, (1, 4, 1, seq), generator=generator)
    return {
        "axes, ours": lambda: [host.nearest_axis(x) for x in turned.transpose(2, 3).contiguous().split(widths, -2)],
        "axes, torch": lambda: [torch.cat([x, -x], -1).argmax(-1) for x in turned.split(widths, -1)],
        "order, ours": lambda: host.stable_order(buckets, count),
        "order, torch": lambda: buckets.sort(dim=-1, stable=True)[1],
    }


def main(arguments: Sequence[str]) -> int:
    """Measures, prints, and returns 0 if every claim holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    claims, found, rows = Claims(), {}, []
    for seq in LENGTHS:
        for name, most in CLAIMED.items():
            timings = timed_in_turn(steps_of(seq, getattr(torch, name)), options.rounds)
            medians = {kind: timing.median()["cpu"] for kind, timing in timings.items()}
            share = (medians["axes, ours"] + medians["order, ours"]) / (medians["axes, torch"] + medians["order, torch"])
            found[f"{seq} {name}"] = medians
            rows.append([f"{seq} {name}", *(1e3 * value for value in medians.values()), share])
            if seq >= 4096:
                claims.at_most(f"{seq} tokens, {name}: ours / torch", share, most)
    print(table(["tokens", *(f"{kind} ms" for kind in medians), "ours / torch"], rows))
    return claims.finish({"benchmark": "hashing", "torch": torch.__version__, "seconds": found})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
