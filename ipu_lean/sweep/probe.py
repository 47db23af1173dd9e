"""Whether trials of one shape train faster together or one by one: measured where they will run, on their own first steps.

The ensemble that is timed is the one that goes on to train, so its steps are not lost. One by one, a few steps are.
"""

from __future__ import annotations

import contextlib
import time
from typing import Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from ipu_lean.errors import RunError
from ipu_lean.models import build_model
from ipu_lean.sweep.alike import program_key
from ipu_lean.sweep.ensemble import Ensemble, finish, run_ensemble
from ipu_lean.sweep.grid import Trial
from ipu_lean.sweep.results import TrialResult
from ipu_lean.sweep.trial import run_trial, task_of
from ipu_lean.train.engines import make_engine
from ipu_lean.train.tasks import Task
from ipu_lean.train.world import World

STEPS = 4  # timed after one that warms up
GAIN = 1.1  # together must be this much faster than alone: it is measured roughly, and has to pay for its tracing
FINER = 1.05  # and half as many together this much faster than all
SMALLEST = 4
ENOUGH = 2.0  # seconds of work, all trials together, below which nothing is worth measuring
TRACING = 40.0  # times of tracing that a program must have before it, for half its size to be tried: that gains little

_known: Dict[Tuple[str, int], int] = {}


class Choice(NamedTuple):
    """How to train some trials: `size` in a program (1: one by one), and the ensemble of the first ones if one is under way.

    Seconds are those of one update of one trial.
    """

    size: int
    ensemble: Optional[Ensemble]
    seconds_alone: float
    seconds_together: float


def run_probed(trials: Sequence[Trial], probe: bool, executor: str) -> Iterator[TrialResult]:
    """Results of trials that may share a program, together or (only with `probe`) one by one, whichever is faster here."""
    task = task_of(trials[0].config)
    size, rest = len(trials), list(trials)
    if probe:
        choice = choose(trials, task)
        size = choice.size
        if choice.ensemble is not None:
            rest = rest[size:]
            yield from finish(choice.ensemble)
    for start in range(0, len(rest), size):
        part = rest[start : start + size]
        if len(part) == 1:
            yield run_trial(part[0], task, executor)
        else:
            yield from run_ensemble(part, task)


def choose(trials: Sequence[Trial], task: Task) -> Choice:
    """Time a few updates alone, together, and half as many together, until fewer no longer helps."""
    key = (program_key(trials[0].config), len(trials))
    if key in _known:
        return Choice(_known[key], None, 0.0, 0.0)
    alone = seconds_alone(trials[0], task)
    best = Choice(1, None, alone, float("inf"))
    updates, size, needed = trials[0].config.train.steps * len(trials), len(trials), alone / GAIN
    while size >= min(SMALLEST, len(trials)) and updates * min(alone, best.seconds_together) > ENOUGH:
        try:
            ensemble = Ensemble(trials[:size], task)
            each = seconds_together(ensemble)
        except (RuntimeError, MemoryError, NotImplementedError):
            break  # an operation that cannot be batched, or too many at once: smaller ones are left to run_trial
        if each > needed:
            break
        best, needed = Choice(size, ensemble, alone, each), each / FINER
        if ensemble.program is None or updates * each < TRACING * ensemble.program.seconds:
            break
        size //= 2
    _known[key] = best.size
    return best


def seconds_together(ensemble: Ensemble) -> float:
    """Seconds of one update of one trial in an ensemble, the fastest of a few; they are part of its training."""
    times: List[float] = []
    while not ensemble.done and len(times) <= STEPS:
        ensemble.advance()
        times.append(ensemble.step_seconds)
    return min(times[1:] or times) / len(ensemble.members)


def seconds_alone(trial: Trial, task: Task) -> float:
    """Seconds of one update of one trial by the ordinary engine, the fastest of a few."""
    config = trial.config
    engine = make_engine(build_model(config, task.vocab), config, World.current(config))
    batches = task.train_batches(config.batch.global_batch, config.seed)
    times: List[float] = []
    try:
        while len(times) <= min(STEPS, config.train.steps):
            batch, started = batches.next(), time.perf_counter()
            with contextlib.suppress(RunError):  # it diverges: a result of its own later, and its steps take their time
                engine.train_step(batch)
            times.append(time.perf_counter() - started)
    finally:
        engine.close()
    return min(times[1:])
