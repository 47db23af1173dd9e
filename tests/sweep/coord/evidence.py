"""Prints the figures behind the thresholds: for sound and for broken networks, by how much each question is missed.

    python -m tests.sweep.coord.evidence [--seeds 10] [--faults] [--only residual]
    python -m tests.sweep.coord.evidence --depth

Sound networks: the worst over all seeds, one seed a check, at two learning rates, and the least that the standard parametrisation
grows. Broken ones (`--faults`): one line each, at learning rate 0.01.
"""
from __future__ import annotations

import argparse
from typing import Dict

import torch

from ipu_lean.mup.diagnosis import diagnose
from ipu_lean.mup.figures import Figures
from ipu_lean.mup.judge import find, find_depth, growth, judge
from ipu_lean.mup.verdict import overall
from ipu_lean.sweep.coord.capture import measure
from ipu_lean.sweep.coord.rig import standard
from tests.sweep.coord.architectures import ALL, RESIDUAL, REVERSIBLE_TIED, STEPS, WIDTHS, Architecture
from tests.sweep.coord.faults import FAULTS

QUESTIONS = ("updates", "vectors", "init", "scores", "readout", "values", "changes", "decay")


def misses(figures: Figures) -> Dict[str, float]:
    """The slope farthest from what it should be, by question; of changes the highest. Vectors' updates apart."""
    found: Dict[str, float] = {}
    for finding in find(figures):
        name = "vectors" if finding.question == "updates" and finding.kind == "vector" else finding.question
        if name in QUESTIONS and finding.slope is not None:
            known = found.get(name, -9.0 if name == "changes" else 0.0)
            further = finding.excess > known if name == "changes" else abs(finding.excess) > abs(known)
            found[name] = finding.excess if further else known
    return found


def line(name: str, found: Dict[str, float], more: str) -> str:
    return f"{name:<46}" + "".join(f"{found[key]:>+9.2f}" if key in found else f"{'':>9}" for key in QUESTIONS) + f"  {more}"


def sound(architecture: Architecture, lr: float, seeds: int) -> str:
    """The worst of `seeds` checks of one seed each."""
    worst: Dict[str, float] = {}
    verdicts: Dict[str, int] = {}
    contrast = float("inf")
    for seed in range(seeds):
        plain = architecture.rig(lr, 100 * seed, lambda config, width: standard(config))
        control = measure(plain, WIDTHS, STEPS, 1, signatures=False)
        figures = measure(architecture.rig(lr, 100 * seed), WIDTHS, STEPS, 1)
        contrast = min(contrast, growth(control))
        verdict = overall(judge(figures, control))
        verdicts[verdict] = verdicts.get(verdict, 0) + 1
        for key, value in misses(figures).items():
            further = value > worst.get(key, -9.0) if key == "changes" else abs(value) > abs(worst.get(key, 0.0))
            worst[key] = value if further else worst[key]
    told = ", ".join(f"{count} {name}" for name, count in sorted(verdicts.items()))
    return line(f"{architecture.name}, lr {lr:g}", worst, f"standard {contrast:+.2f}; {told}")


def depth() -> None:
    """What branches add at the start, and the changes of their sum: with CompleteP's multiplier and without, one seed."""
    for architecture in (RESIDUAL, REVERSIBLE_TIED):
        for lr in (3e-3, 1e-2):
            for rule in ("completep", "none"):
                rig = architecture.rig(lr, axis="depth", mup={"depth_rule": rule})
                figures = measure(rig, (2, 4, 8, 16), STEPS, 1, signatures=False)
                found = [row for row in find_depth(figures) if row.slope is not None]
                branches = [row.slope for row in found if row.question == "branches"]
                changes = max(row.slope for row in found if row.question == "depth")
                told = f"branches {min(branches):+.2f} to {max(branches):+.2f}, sum at most {changes:+.2f}"
                print(f"{architecture.name}, lr {lr:g}, {rule}: {told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--only", help="one architecture")
    parser.add_argument("--depth", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.depth:
        depth()
        return
    print(f"{'':<46}" + "".join(f"{key:>9}" for key in QUESTIONS))
    for architecture in ALL:
        if given.only not in (None, architecture.name):
            continue
        for lr in (3e-3, 1e-2):
            print(sound(architecture, lr, given.seeds), flush=True)
        for fault in FAULTS.values() if given.faults else ():
            if fault.carried_by(architecture):
                figures = measure(fault.make(architecture, 1e-2, 0), WIDTHS, STEPS, 1)
                codes = ", ".join(found.code for found in diagnose(figures))
                told = f"{overall(judge(figures))}: {codes}"
                print(line(f"{architecture.name}: {fault.name}", misses(figures), told), flush=True)


if __name__ == "__main__":
    main()
