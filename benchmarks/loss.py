"""Cross entropy over a long vocabulary: chunks whose gradient is taken in the forward pass, beside the two usual ways.

    python benchmarks/loss.py                  # about two minutes on one core

One thread, steps in turn, medians of CPU time; memory is live tensor storage, parameters and gradients excluded (by formula:
plain 3 x tokens x vocabulary x 4 bytes; ours 1 to 2 chunks of logits, and two gradients of the matrix). Claim: at vocabulary
50308 our step takes at most 1.05 times as long as plain cross entropy and holds at most a third of its memory, and it is faster
than recomputing each chunk with torch.utils.checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, Callable, Dict, Sequence

import torch
import torch.nn.functional as F
from _common import Claims, LiveBytes, parameters_and_gradients, table, timed_in_turn
from torch.utils.checkpoint import checkpoint

from ipu_lean.nn import PopReadout, automatic_chunk, chunked_cross_entropy

SHAPES = ((2048, 256, 50308), (4096, 256, 8192))  # tokens, width, vocabulary


def steps_of(readout: PopReadout, h: torch.Tensor, labels: torch.Tensor, bf16: bool) -> Dict[str, Callable[[], Any]]:
    """Forward and backward by each way; h `[1, tokens, width]`, labels `[1, tokens]`."""
    tokens = labels.numel()
    chunk = automatic_chunk(tokens, readout.out_features)

    def checkpointed() -> torch.Tensor:
        def part(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(readout(x).float(), y, reduction="sum")

        pairs = zip(h[0].split(chunk), labels[0].split(chunk))
        return sum(checkpoint(part, x, y, use_reentrant=False) for x, y in pairs) / tokens

    def step(loss: Callable[[], torch.Tensor]) -> Callable[[], Any]:
        def run() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                value = loss()
            value.backward()
            h.grad = None

        return run

    return {
        "ours": step(lambda: chunked_cross_entropy(h, labels, readout, chunk)[0]),
        "plain": step(lambda: F.cross_entropy(readout(h[0]).float(), labels[0])),
        "checkpointed chunks": step(checkpointed),
    }


def main(arguments: Sequence[str]) -> int:
    """Measures, prints, and returns 0 if every claim holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    claims, found, rows = Claims(), {}, []
    for tokens, width, vocab in SHAPES:
        torch.manual_seed(0)
        readout = PopReadout(width, vocab, bias=False)
        h, labels = torch.randn(1, tokens, width, requires_grad=True), torch.randint(0, vocab, (1, tokens))
        for bf16 in (False, True):
            case = f"{tokens} tokens, width {width}, vocabulary {vocab}, {'bf16-mixed' if bf16 else 'fp32'}"
            steps = steps_of(readout, h, labels, bf16)
            peaks = {}
            for name, step in steps.items():
                with LiveBytes([h, labels, *parameters_and_gradients(readout)]) as live:
                    step()
                peaks[name] = live.peak / 1e6
            timings = timed_in_turn(steps, options.rounds)
            for name, timing in timings.items():
                rows.append([f"{case}: {name}", timing.median()["cpu"], peaks[name]])
            found[case] = {name: {**timing.median(), "peak_mb": peaks[name]} for name, timing in timings.items()}
            if vocab == SHAPES[0][2]:
                claims.at_most(f"{case}: ours / plain, time", timings["ours"].ratio_to(timings["plain"]), 1.05)
                claims.at_most(f"{case}: ours / plain, memory", peaks["ours"] / peaks["plain"], 1 / 3)
                ratio = timings["ours"].ratio_to(timings["checkpointed chunks"])
                claims.at_most(f"{case}: ours / checkpointed, time", ratio, 1.0)
    print(table(["case", "CPU s", "peak MB"], rows))
    return claims.finish({"benchmark": "loss", "torch": torch.__version__, "measured": found})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
