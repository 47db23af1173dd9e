"""What a process holds while it trains, in bytes a parameter, beside what the arithmetic says.

    python benchmarks/memory.py            # 20 M and 125 M parameters, every mode in a process of its own: some minutes
    python benchmarks/memory.py --quick    # 2 M parameters, three modes, no claims

Claims, within 2 %: 16 for fp32 and mixed precision (autocast's casts apart), 10 for pure bf16 with Kahan summation or split
weights, 8 with stochastic rounding or none; with the update in the backward pass 2 less (4 in fp32), plus the largest gradient.
On Linux a figure is the private memory of a fresh process after an update, less what it was before the model was built
(docs/memory.md); with `--device gpu`, torch's allocator's.
"""
from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict

from _common import Claims

from ipu_lean.config import load
from ipu_lean.train.memory.commands import run_memory

SIZES = {"20M": (512, 6, 8, 2048), "125M": (768, 12, 12, 50257)}
QUICK = {"2M": (192, 4, 3, 1024)}
HELD = {"fp32": 16, "bf16-mixed": 16, "fp16-mixed": 16, "kahan": 10, "split": 10, "stochastic": 8, "none": 8}
WITHIN = 0.02


def config_of(size: Any, device: str, seq: int) -> str:
    """A GPT of this size whose activations are small beside its weights."""
    width, depth, heads, vocab = size
    return f"""
name: memory
device: {device}
model: {{width: {width}, depth: {depth}, heads: {heads}, vocab: {vocab}, seq: {seq}}}
mup: {{parametrization: standard}}
batch: {{micro: 1}}
"""


def expected(mode: str, largest: float) -> float:
    """Bytes a parameter by arithmetic; `largest`: the largest tensor's share of all parameters."""
    name, _, fused = mode.partition("+")
    summation = name.partition("/")[2]
    gradient = 2 if summation else 4
    return HELD[summation or name] - (gradient * (1 - largest) if fused else 0)


def main() -> int:
    """Everything; the exit status says whether all claims hold."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, three modes, no claims")
    parser.add_argument("--size", choices=[*SIZES], help="only this one")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--seq", type=int, default=64, help="tokens in the micro-batch of one row")
    args = parser.parse_args()
    sizes = QUICK if args.quick else {name: size for name, size in SIZES.items() if args.size in (None, name)}
    modes = ["fp32", "bf16-pure/kahan", "bf16-pure/kahan+fused"] if args.quick else None
    claims = Claims()
    result: Dict[str, Any] = {}
    for name, size in sizes.items():
        loaded = load(config_of(size, args.device, args.seq))
        with tempfile.TemporaryDirectory() as folder:
            summary = run_memory(loaded, str(Path(folder) / "out"), modes, say=lambda text: print(text, file=sys.stderr))
        print(summary["table"].rpartition("\n")[0] + "\n", flush=True)
        metrics = result[name] = summary["metrics"]
        for row in metrics["modes"]:
            if row["status"] == "refused" and "fp16" in row["mode"] or args.quick:
                continue  # a torch without fp16 on CPU
            wanted = expected(row["mode"], metrics["largest"] / metrics["parameters"])
            found = row["measured"]["bytes_per_parameter"] if row["measured"] else float("inf")
            claims.at_most(f"{row['mode']} ({name}): {found:.2f} for {wanted:.2f}, off by", abs(found / wanted - 1), WITHIN)
    return claims.finish({"benchmark": "memory", "sizes": result})


if __name__ == "__main__":
    sys.exit(main())
