"""Trials per hour: our sweep beside a plain loop over the same trials, on the same two cores.

    python benchmarks/sweep.py                      # about a quarter of an hour on two otherwise idle cores
    python benchmarks/sweep.py --only small         # one case
    python benchmarks/sweep.py --quick              # shows that it runs: a twentieth of the steps, one round, nothing claimed

A user's loop: one trial after another, the model, the optimizer and the schedule of the configuration, torch's own number of
threads, every activation stored. Ours: `executor: auto` with two workers, which decide by a probe whether to train trials
together. Each is a process of its own, timed from its start to its last result, imports and probes included, in turn; medians
over the rounds. Both train the same batches from the same weights: the first losses agree to rounding. At batch sizes and
learning rates like these a rounding error grows from update to update, so the last ones are compared with what it takes to move
them: the trial that ends furthest apart is trained once more by the loop, from weights changed by 1e-7 of themselves.
Claims: at least 4 times as many trials an hour for 32 small ones, never fewer for large ones, and the same training.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from _common import Claims, table


class Case(NamedTuple):
    """A grid: `trials` learning rates and seeds of one shape. bound: claimed ratio; None for a case that is only shown."""

    width: int
    seq: int
    batch: int
    trials: int
    steps: int
    bound: Any


CASES = {
    "small": Case(64, 32, 1, 32, 1000, 4.0),
    "small, four rows": Case(64, 32, 4, 32, 250, None),
    "medium": Case(128, 64, 4, 16, 120, 1.0),
    "large": Case(256, 256, 8, 4, 60, 1.0),
}
WORKERS = 2
FIRST = 8  # updates after which rounding has not grown yet
NUDGE = 1e-7  # of each weight: about one rounding of a float32


def case_of(name: str, quick: bool) -> Case:
    """The case of that name."""
    case = CASES[name]
    return case._replace(steps=max(2, case.steps // 20), bound=None) if quick else case


def trials_of(case: Case, cache: str) -> List[Any]:
    """The grid: learning rates a factor of 1.2 apart, two seeds."""
    from ipu_lean.config import SweepConfig, make_config
    from ipu_lean.sweep.grid import expand

    config = make_config(
        model={"width": case.width, "depth": 2, "seq": case.seq},
        mup={"base_width": 64},
        memory={"engine": "store"},
        batch={"micro": case.batch},
        data={"corpus": "python-docs", "cache": cache},
        train={"steps": case.steps},
    )
    lrs = [2.0**-9 * 1.2**i for i in range(case.trials // 2)]
    return expand(config, SweepConfig(lrs=lrs, seeds=[0, 1]))


def plain(case: Case, cache: str, only: Optional[str] = None) -> Dict[str, List[float]]:
    """The loop that anyone would write; {trial: its losses}. With `only`, that trial alone and from weights a little changed."""
    import torch

    from ipu_lean.models import build_model
    from ipu_lean.optim import build_optimizer, build_schedule
    from ipu_lean.sweep.trial import task_of

    found = {}
    for trial in trials_of(case, cache):
        if only is not None and trial.id != only:
            continue
        config, task = trial.config, task_of(trial.config)
        model = build_model(config, task.vocab)
        if only is not None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1 + NUDGE)
        optimizer, schedule = build_optimizer(model, config), build_schedule(config)
        batches = task.train_batches(config.batch.global_batch, config.seed)
        losses = found[trial.id] = []
        for update in range(config.train.steps):
            inputs, labels = (torch.from_numpy(array) for array in batches.next())
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * schedule.lr_at(update)
            loss, _ = model.loss(model.hidden(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip)
            optimizer.step()
            losses.append(loss.item())
    return found


def ours(case: Case, cache: str, only: Optional[str] = None) -> Dict[str, List[float]]:
    """The sweep's planner and local workers; {trial: its losses}."""
    from ipu_lean.sweep.jobs import plan_jobs
    from ipu_lean.sweep.workers import run_local

    found = {}

    def on_result(result: Any) -> None:
        found[result.id] = result.losses

    run_local(plan_jobs(trials_of(case, cache), "auto", WORKERS), WORKERS, on_result, lambda: False)
    return found


def timed(way: str, name: str, cache: str, quick: bool, only: Optional[str] = None) -> Dict[str, Any]:
    """One way through one case in a process of its own: seconds, and the losses of each trial."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, __file__, "--way", way, "--only", name, "--cache", cache, *(["--quick"] if quick else [])]
    command += [] if only is None else ["--trial", only]
    started = time.perf_counter()
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, encoding="utf-8")
    return {"seconds": time.perf_counter() - started, "losses": json.loads(done.stdout.splitlines()[-1])}


def apart(theirs: Sequence[float], mine: Sequence[float]) -> float:
    """The largest relative distance of two series of losses."""
    return max(abs(one - other) / one for one, other in zip(theirs, mine))


def measure(name: str, cache: str, rounds: int, quick: bool) -> Dict[str, Any]:
    """Both ways in turn: seconds by round, the median ratio, and how far the losses are apart at the beginning and at the end."""
    seconds: Dict[str, List[float]] = {"plain": [], "ours": []}
    runs: Dict[str, Any] = {}
    for _ in range(rounds):
        runs = {way: timed(way, name, cache, quick) for way in ("plain", "ours")}
        for way, run in runs.items():
            seconds[way].append(run["seconds"])
    theirs, mine = runs["plain"]["losses"], runs["ours"]["losses"]
    last = {trial: apart(losses[-1:], mine[trial][-1:]) for trial, losses in theirs.items()}
    worst = max(last, key=last.__getitem__)
    nudged = timed("plain", name, cache, quick, worst)["losses"][worst]
    return {
        "seconds": seconds,
        "ratio": statistics.median(slow / fast for slow, fast in zip(seconds["plain"], seconds["ours"])),
        "first_losses_apart": max(apart(losses[:FIRST], mine[trial][:FIRST]) for trial, losses in theirs.items()),
        "last_losses_apart": last[worst],
        "median_last_losses_apart": statistics.median(last.values()),
        "nudged_losses_apart": apart(theirs[worst][-10:], nudged[-10:]),
    }


def main(arguments: Sequence[str]) -> int:
    """Measures, prints, and returns 0 if every claim holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=list(CASES), action="append", help="this case only; may be given more than once")
    parser.add_argument("--quick", action="store_true", help="a twentieth of the steps, one round, no claims on time")
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=["plain", "ours"], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = options.only or list(CASES)
    if options.way:
        way = plain if options.way == "plain" else ours
        print(json.dumps(way(case_of(names[0], options.quick), options.cache, options.trial)))
        return 0
    claims, rows, found = Claims(), [], {}
    with tempfile.TemporaryDirectory() as folder:
        cache = str(Path(folder) / "cache")
        for name in names:
            case = case_of(name, options.quick)
            timed("plain", name, cache, quick=True)  # prepares the tokens
            found[name] = measure(name, cache, 1 if options.quick else options.rounds, options.quick)
            hours = {way: statistics.median(values) / 3600 for way, values in found[name]["seconds"].items()}
            shape = f"{name}: {case.trials} trials of {case.steps} steps, width {case.width}, {case.batch} x {case.seq} tokens"
            print(f"{shape}: {found[name]['ratio']:.2f} times", flush=True)
            rows.append([shape, *(f"{case.trials / hours[way]:.0f}" for way in ("plain", "ours")), found[name]["ratio"]])
            if case.bound is not None:
                claims.at_least(f"{name}: trials per hour, ours / plain", found[name]["ratio"], case.bound)
            claims.at_most(f"{name}: first {FIRST} losses apart", found[name]["first_losses_apart"], 1e-5)
            rounding = max(0.02, 3 * found[name]["nudged_losses_apart"])
            claims.at_most(f"{name}: last losses apart, against a change of 1e-7", found[name]["last_losses_apart"], rounding)
    print(table(["case", "plain / h", "ours / h", "ratio"], rows))
    return claims.finish({"benchmark": "sweep", "cores": os.cpu_count(), "measured": found})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
