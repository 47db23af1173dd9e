"""One trial, in this process: the numbers that `train` gives for its configuration, without a run directory.

What makes a result out of losses stands here in functions of its own, for those that compute many trials at once.
"""

from __future__ import annotations

import json
import math
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np
from torch import nn

from ipu_lean.config import Config
from ipu_lean.errors import Interrupted, IpuLeanError, RunError
from ipu_lean.models import build_model
from ipu_lean.sweep.grid import Trial
from ipu_lean.sweep.results import DIVERGED, DONE, FAILED, TrialResult, final_loss
from ipu_lean.train import rng
from ipu_lean.train.engines import make_engine
from ipu_lean.train.engines.protocol import Batch, DeviceFailure, Engine, StepResult
from ipu_lean.train.evaluate import evaluate_all
from ipu_lean.train.tasks import BatchStream, Task, open_task
from ipu_lean.train.world import World

DIVERGED_MULTIPLE = 10.0
"""A loss above this multiple of the first update's ends a trial: it will not come back within the horizon."""


def diverged_at(losses: Sequence[float]) -> Optional[int]:
    """The update, counted from 1, at which the losses left for good: not finite, or above DIVERGED_MULTIPLE of the first."""
    for index, loss in enumerate(losses):
        if not math.isfinite(loss) or loss > DIVERGED_MULTIPLE * losses[0]:
            return index + 1
    return None


def make_result(
    trial: Trial,
    losses: Sequence[float],
    *,
    seconds: float,
    executor: str,
    valid: Optional[Dict[str, float]] = None,
    status: Optional[str] = None,
    error: Optional[str] = None,
) -> TrialResult:
    """The record of a trial that gave these losses; without a `status` it is `done`, or `diverged` by the rule above."""
    losses = [float(loss) for loss in losses]
    step = diverged_at(losses)
    if status is None:
        status = DONE if step is None else DIVERGED
        error = error or (None if step is None else f"the loss was {losses[step - 1]:.4g} at step {step}")
    loss = final_loss(losses, trial.final_share) if status == DONE else math.inf
    return TrialResult(trial.id, dict(trial.axes), status, losses, loss, dict(valid or {}), seconds, executor, error)


def with_share(trial: Trial, result: TrialResult) -> TrialResult:
    """The record of the same training under `trial`'s `final_share`."""
    loss = final_loss(result.losses, trial.final_share) if result.status == DONE else math.inf
    return replace(result, id=trial.id, axes=dict(trial.axes), loss=loss)


def failed_result(trial: Trial, error: str, executor: str, seconds: float = 0.0) -> TrialResult:
    """The record of a trial that ended for a reason that says nothing about its settings."""
    return make_result(trial, [], seconds=seconds, executor=executor, status=FAILED, error=error)


def evaluate_trained(trial: Trial, model: nn.Module, task: Task) -> Dict[str, float]:
    """Loss of each validation set, with the weights that `model` has on this host; nothing unless the trial asks for it."""
    if not trial.evaluate:
        return {}
    world = World.current(trial.config)
    engine = make_engine(model, trial.config, world, train=False)
    try:
        return _valid(engine, task, world)
    finally:
        engine.close()


def run_trial(trial: Trial, task: Optional[Task] = None, executor: str = "sequential") -> TrialResult:
    """Train one trial to its end, or to the update at which it diverges.

    Args:
        task: the data, from `task_of`; opened here unless given. executor: noted in the result.
    Returns:
        The result; a trial's own failure (memory, device, a bug) is a result too. Only Interrupted, and a task that cannot be
        opened, raise.
    """
    data = task_of(trial.config) if task is None else task
    return ended(trial, lambda losses: _train(trial, data, losses), executor)


def ended(trial: Trial, train: Callable[[List[float]], Dict[str, float]], executor: str) -> TrialResult:
    """What training comes to, however it ends; only Interrupted is raised.

    Args:
        train: trains, adds each update's loss to the list it is given, and returns the validation losses.
    """
    started = time.perf_counter()
    losses: List[float] = []
    valid: Dict[str, float] = {}
    status = error = None
    try:
        valid = train(losses)
    except _Diverged as problem:
        status, error = DIVERGED, str(problem)
    except Interrupted:
        raise
    except Exception as problem:  # whatever it was, the other trials go on, and this one tells
        status, error = FAILED, reason(problem)
    return make_result(
        trial, losses, seconds=time.perf_counter() - started, executor=executor, valid=valid, status=status, error=error
    )


def reason(problem: BaseException) -> str:
    """An exception in one line: our own errors speak for themselves, others name their kind and place."""
    text = " ".join(str(problem).split())
    if isinstance(problem, IpuLeanError):
        return text
    last = traceback.extract_tb(problem.__traceback__)[-1:]
    place = "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in last)
    return f"{type(problem).__name__}: {text[:300]}{place}"


class _Diverged(RunError):
    """The engine met numbers that are not finite."""


def _train(trial: Trial, task: Task, losses: List[float]) -> Dict[str, float]:
    """Fills `losses`; the validation losses if they are wanted. In the order of a run: model, data, engine, then the seeds."""
    config = trial.config
    world = World.current(config)
    model = build_model(config, task.vocab)
    batches = task.train_batches(config.batch.global_batch, config.seed)
    engine = make_engine(model, config, world)
    try:
        rng.seed_all(config.seed, 0)
        while len(losses) < config.train.steps:
            _update(engine, batches, losses)
            if diverged_at(losses) is not None:
                return {}
        return _valid(engine, task, world) if trial.evaluate else {}
    finally:
        engine.close()


def _update(engine: Engine, batches: BatchStream, losses: List[float]) -> None:
    """One call of the engine; the losses of its updates are added. `_Diverged` where the engine gives up."""
    result = step(engine, next_batch(engine, batches))
    losses += result.losses or (result.loss,)


def next_batch(engine: Engine, batches: BatchStream) -> Batch:
    """What one call of the engine reads: the batches of its updates, one after the other."""
    rows = [batches.next() for _ in range(engine.updates_per_call)]
    return rows[0] if len(rows) == 1 else tuple(np.concatenate(parts) for parts in zip(*rows))


def step(engine: Engine, batch: Batch) -> StepResult:
    """One call of the engine. What it says of numbers that are not finite ends a trial as diverged (see `ended`)."""
    try:
        return engine.train_step(batch)
    except DeviceFailure:
        raise
    except RunError as error:
        raise _Diverged(str(error)) from error


def _valid(engine: Engine, task: Task, world: World) -> Dict[str, float]:
    return {name: float(metrics["loss"]) for name, metrics in evaluate_all(engine, task, world).items()}


_open: List[Tuple[str, Task]] = []


def task_of(config: Config) -> Task:
    """The data of a configuration; the last one stays open, since the trials of a sweep share it."""
    model = config.model
    sizes = [model.kind, model.head, model.seq, model.vocab]
    parts = [config.data.model_dump(mode="json"), config.batch.model_dump(mode="json"), *sizes]
    key = json.dumps(parts, sort_keys=True)
    if not _open or _open[0][0] != key:
        _open[:] = [(key, open_task(config))]
    return _open[0][1]
