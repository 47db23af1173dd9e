"""The planner against the published table: every figure beside ours, and the verdicts.

    python benchmarks/plan.py

Exits non-zero if a figure is more than 5 % off, if a published run is told not to fit, or if one that nobody published gets
another verdict than expected. (The table's figures are estimates too: which runs work was published, not the bytes they take.)
"""

from __future__ import annotations

import json
import sys

from ipu_lean.ipu.plan import make_plan
from ipu_lean.ipu.plan.published import PUBLISHED, UNPUBLISHED

TOLERANCE = 0.05


def main() -> int:
    """Print the table; 1 if the claim does not hold."""
    print(f"{'run':<24}{'F':>4}{'2F-1':>6}{'weights MB':>15}{'stash MB':>13}{'live MB':>13}{'sum MB':>13}{'%':>11}{'+temp %':>11}"
          "  verdict")
    worst, wrong = 0.0, []
    for workload, figures in PUBLISHED + UNPUBLISHED:
        plan = make_plan(workload)
        items = plan.fullest.items
        weights = items["weights"] + items["accumulators"] + items["state"]
        ours = [number / 1e6 for number in (weights, items["stash"], items["live"], plan.fullest.before)]
        ours += [100 * share for share in plan.fullest.shares]
        theirs = [figures.weights, figures.stash, figures.live, figures.total, figures.before, figures.after]
        worst = max([worst, *(abs(mine / figure - 1) for mine, figure in zip(ours, theirs) if figure)])
        expected = [figures.verdict] if figures.verdict else ["fits", "tight"]
        if plan.verdict not in expected or plan.forward != figures.forward:
            wrong.append(workload.name)
        pairs = [f"{mine:.0f} / {figure:.0f}" for mine, figure in zip(ours, theirs)]
        cells = "".join(f"{pair:>{width}}" for pair, width in zip(pairs, (15, 13, 13, 13, 11, 11)))
        print(f"{workload.name:<24}{plan.forward:>4}{plan.needed:>6}{cells}  {plan.verdict}")
    holds = worst <= TOLERANCE and not wrong
    print("ours / the table's; the fullest IPU of each run")
    print(json.dumps({"benchmark": "plan", "largest_difference": round(worst, 4), "wrong_verdicts": wrong, "holds": holds}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
