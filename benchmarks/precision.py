"""A training step in pure bf16 beside mixed precision and fp32: ours against ours, by the engine that `train` uses.

    python benchmarks/precision.py            # 20 M parameters, 512 tokens, two stacks: some minutes on an idle machine
    python benchmarks/precision.py --quick    # 1 M parameters, no claims

Claim: a pure-bf16 step (Kahan, split, stochastic) takes no more time than a bf16-mixed one. It casts no weights, and its update
moves half the bytes. Times are CPU time of whole steps, all precisions in turn in one process, median of ratios within a round.
"""
from __future__ import annotations

import argparse
import sys
from typing import Any, Callable, Dict

import numpy as np
import torch
from _common import Claims, table, timed_in_turn

from ipu_lean.config import make_config
from ipu_lean.models import build_model
from ipu_lean.train.engines import make_engine
from ipu_lean.train.world import World

SIZE = {"width": 512, "depth": 6, "heads": 8, "vocab": 2048, "seq": 256}
QUICK = {"width": 128, "depth": 4, "heads": 2, "vocab": 1024, "seq": 128}
PURE = ("kahan", "split", "stochastic")
MIXED = "bf16-mixed"


def step_of(model: Dict[str, Any], stack: str, precision: str) -> Callable[[], Any]:
    """A call that makes one update on a fixed batch; `precision` may name a summation (`bf16-pure/kahan`)."""
    precision, _, summation = precision.partition("/")
    config = make_config(
        precision=precision,
        model={**model, "stack": {"kind": stack}},
        mup={"base_width": 64},
        batch={"micro": 2},
        optimizer={"summation": summation} if summation else {},
    )
    engine = make_engine(build_model(config, model["vocab"]), config, World())
    draw = np.random.RandomState(0)
    batch = tuple(draw.randint(0, model["vocab"], (2, model["seq"])).astype(np.int32) for _ in range(2))
    return lambda: engine.train_step(batch)  # type: ignore[arg-type]


def main() -> int:
    """Everything; the exit status says whether all claims hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, no claims")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    claims = Claims()
    result: Dict[str, Any] = {}
    for stack in ("residual", "reversible"):
        names = ("fp32", MIXED, *(f"bf16-pure/{summation}" for summation in PURE))
        steps = {name: step_of(QUICK if args.quick else SIZE, stack, name) for name in names}
        timings = timed_in_turn(steps, 3 if args.quick else args.rounds, warmup=2)
        mixed = timings[MIXED]
        rows = [[name, t.median()["cpu"] * 1e3, t.median()["wall"] * 1e3, t.ratio_to(mixed)] for name, t in timings.items()]
        print(f"{stack} stack")
        print(table(["", "CPU ms", "wall ms", f"x {MIXED}"], rows) + "\n", flush=True)
        result[stack] = {row[0]: {"cpu_ms": row[1], "wall_ms": row[2], "ratio": row[3]} for row in rows}
        for name in names[2:]:
            if not args.quick:
                claims.at_most(f"{name}'s time over {MIXED}'s ({stack})", timings[name].ratio_to(mixed), 1.0)
    return claims.finish({"benchmark": "precision", "stacks": result})


if __name__ == "__main__":
    sys.exit(main())
