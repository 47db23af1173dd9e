"""The learning rate's optimum over widths 32 to 256, under muP and under the standard parametrisation.

    python benchmarks/mutransfer.py                       # about ten minutes on two cores
    python benchmarks/mutransfer.py --out DIR             # keeps the sweep there; the same command again goes on with it
    python benchmarks/mutransfer.py --quick               # a few trials, a minute, no claim

It is `ipu-lean sweep configs/mutransfer.yaml`: the package's default GPT (reversible, rotary, AdamW, clipped, cosine) with two
layers, and a readout of its own. Two layers are CompleteP's base depth, so its multiplier is 1 here, and only widths differ.
Prints the table, where the plot is, and one JSON line; exits with 1 if a claim fails.
"""
from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

from _common import Claims, table

from ipu_lean.config import load
from ipu_lean.errors import VerdictFailed
from ipu_lean.sweep.commands import resume_sweep, run_sweep
from ipu_lean.sweep.directory import is_sweep

MUP_DRIFT, STANDARD_DRIFT, SECONDS = 0.25, 0.75, 900.0
CONFIG = Path(__file__).parents[1] / "configs" / "mutransfer.yaml"
QUICK = ["train.steps=20", "schedule.warmup=2", "sweep.widths=32..64", "sweep.lrs=2^-7..2^-5"]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def sweep(overrides: List[str], out: str) -> Dict[str, Any]:
    """The sweep's summary; a verdict that failed is one too."""
    loaded = load(CONFIG, overrides)
    try:
        return resume_sweep(out, loaded, say=say) if is_sweep(out) else run_sweep(loaded, out, say=say)
    except VerdictFailed as failure:
        assert failure.summary is not None
        return failure.summary


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--corpus", default="auto", help="as data.corpus (default auto: the King James Bible if it is installed)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--executor", default="auto")
    parser.add_argument("--out", help="keep the sweep in this directory")
    given = parser.parse_args()
    started = time.perf_counter()
    overrides = [f"data.corpus={given.corpus}", f"sweep.workers={given.workers}", f"sweep.executor={given.executor}"]
    overrides += QUICK if given.quick else []
    with tempfile.TemporaryDirectory() as temporary:
        summary = sweep(overrides, given.out or str(Path(temporary) / "sweep"))
        seconds = time.perf_counter() - started
        print(summary["table"])
        groups = {group["parametrization"]: group for group in summary["metrics"]["groups"]}
        rows = [(name, group["slope"], group["slope_error"], group["noise"], group["verdict"]) for name, group in groups.items()]
        print(table(("parametrisation", "log2 per doubling", "error", "noise of a loss", "verdict"), rows))
        print(f"plot: {summary['artifacts']['plot']}" + ("" if given.out else " (gone with this command; --out DIR keeps it)"))
    claims = Claims()
    if not given.quick:
        slopes = {name: math.nan if group["slope"] is None else group["slope"] for name, group in groups.items()}
        inside = [one["problem"] is None for group in groups.values() for one in group["optima"]]
        claims.at_least("minima inside the grid", sum(inside), len(inside))
        claims.at_most("muP: drift of the optimum, log2 per doubling", abs(slopes["mup"]), MUP_DRIFT)
        claims.at_least("standard: drift of the optimum, log2 per doubling", abs(slopes["standard"]), STANDARD_DRIFT)
        claims.at_most(f"seconds with {given.workers} workers", seconds, SECONDS)
    result = {"seconds": seconds, "workers": given.workers, "counts": summary["metrics"]["counts"], "groups": [*groups.values()]}
    return claims.finish({"benchmark": "mutransfer", **result})


if __name__ == "__main__":
    sys.exit(main())
