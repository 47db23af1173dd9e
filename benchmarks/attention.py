"""Causal attention on CPU, forward and backward: our blocks of queries beside torch's fused kernel and the written-out form.

    python benchmarks/attention.py             # about a minute on one core

One thread, steps in turn, medians of CPU time. Claim: at sequence 512 with 4 heads of 64 (batch 8), ours is at least 1.1 times as
fast as torch's kernel in float32, and 1.3 times in bfloat16. The other shapes are for information: `worthwhile` in
ipu_lean/nn/attention/blockwise.py follows them.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, Callable, Dict, Sequence

import torch
import torch.nn.functional as F
from _common import Claims, table, timed_in_turn

from ipu_lean.nn.attention.blockwise import blockwise_attention

SHAPES = ((8, 512, 4, 64), (8, 512, 1, 64), (8, 128, 2, 64), (2, 2048, 4, 64), (1, 1024, 16, 64))
CLAIMED = {"float32": 1.1, "bfloat16": 1.3}


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax over all scores; `[batch, heads, seq, head_size]`."""
    mask = torch.full((q.shape[2], q.shape[2]), -1e4, dtype=q.dtype).triu(1)
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2)) + mask
    return torch.matmul(scores.softmax(-1), v)


def steps_of(shape: Sequence[int], dtype: torch.dtype) -> Dict[str, Callable[[], Any]]:
    """One forward and backward pass of each kind over the same `[batch, seq, 3, heads, head_size]`."""
    batch, seq, heads, size = shape
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(batch, seq, 3, heads, size, generator=generator).to(dtype).requires_grad_()
    seed = torch.randn(batch, seq, heads, size, generator=generator).to(dtype)

    def apart(attend: Callable[..., torch.Tensor]) -> Callable[[], Any]:
        def step() -> None:
            q, k, v = (t.transpose(1, 2) for t in packed.unbind(2))
            torch.autograd.grad(attend(q, k, v).transpose(1, 2), packed, seed)

        return step

    return {
        "ours": lambda: torch.autograd.grad(blockwise_attention(packed, None, size**-0.5), packed, seed),
        "torch's kernel": apart(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        "written out": apart(written_out),
    }


def main(arguments: Sequence[str]) -> int:
    """Measures, prints, and returns 0 if every claim holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    claims, found, rows = Claims(), {}, []
    for shape in SHAPES:
        for name in ("float32", "bfloat16"):
            timings = timed_in_turn(steps_of(shape, getattr(torch, name)), options.rounds)
            medians = {kind: timing.median()["cpu"] for kind, timing in timings.items()}
            faster = timings["torch's kernel"].ratio_to(timings["ours"])
            found[f"{tuple(shape)} {name}"] = medians
            rows.append([f"{tuple(shape)} {name}", *(1e3 * value for value in medians.values()), faster])
            if shape == SHAPES[0]:
                claims.at_least(f"{name}: torch's kernel / ours", faster, CLAIMED[name])
    print(table(["batch, seq, heads, head size", *(f"{kind} ms" for kind in medians), "kernel / ours"], rows))
    return claims.finish({"benchmark": "attention", "torch": torch.__version__, "seconds": found})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
