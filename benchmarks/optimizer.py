"""One step of AnyPrecisionAdamW in pure bf16 beside torchdistx's, optimi's and torch's, and beside moving the same bytes.

    python benchmarks/optimizer.py            # 20 M and 125 M parameters, one and two threads: some minutes on an idle machine
    python benchmarks/optimizer.py --quick    # 1 M parameters, one thread, no claims

Weights, gradients, moments and compensation in bf16, transformer shapes, beta2 0.95, weight decay 0.1. torchdistx's rule is the
package's where it is installed, else ours with numerics="published", which has the same operations (its bits are compared in
tests/optim/test_any_precision.py). optimi: `pip install torch-optimi`. torch's fused AdamW has bf16 states and keeps no
compensation. The floor reads weight, gradient, two moments and compensation and writes all but the gradient, one compiled pass:
18 bytes a parameter, almost no arithmetic. Times are CPU time, all variants in turn, median of ratios within a round.
"""
from __future__ import annotations

import argparse
import sys
import warnings
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from _common import Claims, table, timed_in_turn
from torch import nn

from ipu_lean import _compat
from ipu_lean.optim import AnyPrecisionAdamW

BF16 = torch.bfloat16
SIZES = {"20M": (512, 6, 2048), "125M": (768, 12, 50257)}
QUICK = {"1M": (128, 4, 1024)}
SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
Step = Callable[[], Any]


def shapes(width: int, layers: int, vocab: int) -> List[Tuple[int, ...]]:
    """Embedding, then per layer four attention matrices with biases, an FFN of ratio 4 with biases, and two norms."""
    layer: List[Tuple[int, ...]] = [(width, width), (width,)] * 4
    layer += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)] + [(width,)] * 4
    return [(vocab, width)] + layer * layers


def parameters(size: Tuple[int, int, int]) -> List[nn.Parameter]:
    """bf16 parameters of usual sizes, with gradients."""
    torch.manual_seed(0)
    made = [nn.Parameter((torch.randn(shape) * 0.02).to(BF16)) for shape in shapes(*size)]
    for parameter in made:
        parameter.grad = (torch.randn(parameter.shape) * 1e-3).to(BF16)
    return made


def ours(summation: str, compiled: Optional[bool] = None) -> Callable[[Any], Step]:
    """AnyPrecisionAdamW with everything in bf16."""
    return lambda params: AnyPrecisionAdamW(params, summation=summation, momentum_dtype=BF16, compiled=compiled, **SETTINGS).step


def torchdistx(params: Any) -> Step:
    """The published optimizer with Kahan summation."""
    options = {"use_kahan_summation": True, "momentum_dtype": BF16, "variance_dtype": BF16, **SETTINGS}
    try:
        from torchdistx.optimizers import AnyPrecisionAdamW as Theirs
    except ImportError:
        return AnyPrecisionAdamW(params, numerics="published", **options).step
    return Theirs(params, **options).step


def optimi(params: Any) -> Step:
    """optimi's Kahan AdamW, which uses gradients as scratch memory: it trains on zeros from the second step on."""
    from optimi import AdamW

    return AdamW(params, kahan_sum=True, **SETTINGS).step


def torch_fused(params: Any) -> Step:
    """torch's fused AdamW on bf16 weights and states: nothing keeps what rounding loses."""
    return torch.optim.AdamW(params, fused=True, **SETTINGS).step


def moving_bytes(params: Any) -> Step:
    """The floor: one pass over as many bytes as the Kahan update moves."""
    count = sum(parameter.numel() for parameter in params) // 2  # two bf16 in an int32

    def move(w: Any, g: Any, m: Any, v: Any, c: Any) -> None:
        w.add_(g)
        m.add_(1)
        v.add_(1)
        c.add_(1)

    buffers = [torch.zeros(count, dtype=torch.int32) for _ in range(5)]
    once = torch.compile(move, dynamic=False)

    def step() -> None:
        with torch.no_grad():
            once(*buffers)

    return step


def variants() -> Dict[str, Callable[[Any], Step]]:
    """What is timed, by name; peers that are missing are left out with a warning."""
    found: Dict[str, Callable[[Any], Step]] = {
        "floor": moving_bytes,
        "none": ours("none"),
        "stochastic": ours("stochastic"),
        "split": ours("split"),
        "kahan": ours("kahan"),
        "kahan, no compiler": ours("kahan", compiled=False),
        "torchdistx": torchdistx,
        "torch fused": torch_fused,
    }
    try:
        import optimi as _  # noqa: F401

        found["optimi"] = optimi
    except ImportError:
        warnings.warn("optimi is not installed (pip install torch-optimi): its claim is not checked", stacklevel=1)
    return found


def measure(size: Tuple[int, int, int], threads: int, rounds: int) -> Dict[str, Any]:
    """Timings of every variant, by name."""
    torch.set_num_threads(threads)
    steps = {name: build(parameters(size)) for name, build in variants().items()}
    return timed_in_turn(steps, rounds, warmup=2)


def main() -> int:
    """Everything; the exit status says whether all claims hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, one thread, no claims")
    parser.add_argument("--size", choices=[*SIZES], help="only this one")
    parser.add_argument("--threads", type=int, choices=(1, 2), help="only so many")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    problem = _compat.why_not_compiled("cpu")
    if problem is not None:
        print(f"nothing to measure: {problem}", file=sys.stderr)
        return 3
    sizes = QUICK if args.quick else {name: size for name, size in SIZES.items() if args.size in (None, name)}
    claims, result = Claims(), {}
    for name, size in sizes.items():
        count = sum(torch.Size(shape).numel() for shape in shapes(*size))
        for threads in (1,) if args.quick else (1, 2) if args.threads is None else (args.threads,):
            timings = measure(size, threads, 3 if args.quick else args.rounds)
            mine = timings["kahan"]
            rows = [[key, t.median()["cpu"] * 1e3, t.median()["wall"] * 1e3, t.ratio_to(mine)] for key, t in timings.items()]
            print(f"{count:,} parameters in {len(shapes(*size))} tensors, {threads} thread{'s' * (threads > 1)}")
            print(table(["", "CPU ms", "wall ms", "x kahan"], rows) + "\n", flush=True)
            result[f"{name}, {threads}"] = {row[0]: {"cpu_ms": row[1], "wall_ms": row[2], "ratio": row[3]} for row in rows}
            if args.quick:
                continue
            where = f"({name}, {threads} thread{'s' * (threads > 1)})"
            claims.at_least(f"torchdistx's time over ours {where}", timings["torchdistx"].ratio_to(mine), 4.0)
            if "optimi" in timings:
                claims.at_least(f"optimi's time over ours {where}", timings["optimi"].ratio_to(mine), 3.5)
            claims.at_most(f"our time over torch's fused AdamW's {where}", mine.ratio_to(timings["torch fused"]), 1.0)
            claims.at_most(f"our time over that of moving the bytes {where}", mine.ratio_to(timings["floor"]), 2.0)
    return claims.finish({"benchmark": "optimizer", "sizes": result})


if __name__ == "__main__":
    sys.exit(main())
