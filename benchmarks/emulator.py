"""One training step of the quickstart model on the emulated IPU beside the CPU mirror's.

    python benchmarks/emulator.py            # about two minutes
    python benchmarks/emulator.py --quick    # a small model, a few seconds, no claim

All train the same weights on the same rows with AdamW and accumulation. Two mirrors: as a CPU run is configured (fused attention,
reversible engine), and with the emulator's own arithmetic (explicit attention, every activation stored). Compilation, which
happens once, is timed apart.
"""
from __future__ import annotations

import argparse
import copy
import sys
import time
from typing import Any, Callable, Dict, Tuple

import torch
from _common import Claims, table, timed_in_turn
from torch import nn

import ipu_lean.ipu.emulator as poptorch
from ipu_lean.config import load_config
from ipu_lean.models import TrainStep, build_model

VOCAB = 257
BOUND, GOAL = 1.5, 1.2
Batch = Tuple[torch.Tensor, torch.Tensor]


class Marked(nn.Module):
    """The step as PopTorch takes it: metric sums and one marked loss."""

    def __init__(self, step: TrainStep) -> None:
        super().__init__()
        self.step = step

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        loss, sums = self.step(tokens, labels)
        return sums, poptorch.identity_loss(loss, "none")


def model(text: str, **choices: str) -> nn.Module:
    return build_model(load_config(text, [f"{key.replace('__', '.')}={value}" for key, value in choices.items()]), VOCAB)


def mirror(step: TrainStep, accumulation: int, batch: Batch) -> Callable[[], float]:
    """Plain torch: accumulate micro-batches, step once."""
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-3, weight_decay=0.1)
    micros = list(zip(*[tensor.chunk(accumulation) for tensor in batch]))

    def update() -> float:
        optimizer.zero_grad(set_to_none=True)
        for tokens, labels in micros:
            loss, _ = step(tokens, labels)
            (loss / accumulation).backward()
        optimizer.step()
        return loss.item()

    return update


def emulated(step: TrainStep, accumulation: int, batch: Batch) -> Tuple[Callable[[], float], float]:
    """One executor call, and the seconds that compilation took."""
    options = poptorch.Options()
    options.Training.gradientAccumulation(accumulation)
    executor = poptorch.trainingModel(Marked(step), options, poptorch.optim.AdamW(step.parameters(), lr=1e-3, weight_decay=0.1))
    start = time.perf_counter()
    executor.compile(*batch)
    return lambda: executor(*batch)[1].item(), time.perf_counter() - start


def measure(text: str, micro: int, seq: int, accumulation: int, rounds: int) -> Dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shape = (micro * accumulation, seq)
    batch = tuple(torch.randint(0, VOCAB, shape, generator=generator, dtype=torch.int32) for _ in range(2))
    plain = model(text, model__attention="explicit", memory__engine="store", memory__loss_chunk="0")
    usual = model(text)
    usual.load_state_dict(plain.state_dict())
    step, compile_seconds = emulated(TrainStep(copy.deepcopy(plain)), accumulation, batch)
    steps = {
        "mirror, as configured": mirror(TrainStep(usual), accumulation, batch),
        "mirror, same arithmetic": mirror(TrainStep(plain), accumulation, batch),
        "emulated": step,
    }
    losses = {name: run() for name, run in steps.items()}
    return {"timings": timed_in_turn(steps, rounds), "losses": losses, "compile_seconds": compile_seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    config = load_config(given.config)
    text = "model: {width: 32, depth: 2, heads: 2, seq: 32}\nmup: {base_width: 32}" if given.quick else given.config
    micro, seq = (2, 32) if given.quick else (config.batch.micro, config.model.seq)
    found = measure(text, micro, seq, accumulation=2, rounds=2 if given.quick else 7)
    timings = found.pop("timings")
    mirrored = timings["mirror, as configured"]
    print(table(("step", "wall s", "CPU s", "by the mirror", "first loss"),
                [(name, *timing.median().values(), timing.ratio_to(mirrored), found["losses"][name])
                 for name, timing in timings.items()]))
    print(f"compiled once in {found['compile_seconds']:.2f} s")
    ratios = {name: timings["emulated"].ratio_to(timings[name]) for name in timings if name != "emulated"}
    claims = Claims()
    spread = max(found["losses"].values()) - min(found["losses"].values())
    claims.at_most("the three first losses differ relatively by", spread / found["losses"]["emulated"], 1e-5)
    if not given.quick:
        for name, ratio in ratios.items():
            claims.at_most(f"emulated step by {name}", ratio, BOUND)
    return claims.finish({"benchmark": "emulator", "goal": GOAL, "ratios": ratios, "threads": given.threads,
                          "seconds": {name: timing.median() for name, timing in timings.items()}, **found})


if __name__ == "__main__":
    sys.exit(main())
