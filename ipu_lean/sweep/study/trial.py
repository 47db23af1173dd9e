"""One variant with one seed, in this process: the numbers of `train`, and beside them gradient norms, memory and speed."""

from __future__ import annotations

import statistics
import time
from typing import Any, Dict, Iterator, List, Sequence

import numpy as np
from torch import nn

from ipu_lean.errors import Interrupted, RunError
from ipu_lean.models import build_model
from ipu_lean.sweep.grid import Trial
from ipu_lean.sweep.results import DIVERGED, FAILED
from ipu_lean.sweep.study.peak import peak_megabytes
from ipu_lean.sweep.study.result import VariantResult
from ipu_lean.sweep.trial import diverged_at, evaluate_trained, make_result, reason, task_of
from ipu_lean.train import rng
from ipu_lean.train.engines import make_engine
from ipu_lean.train.engines.protocol import DeviceFailure
from ipu_lean.train.tasks import Task
from ipu_lean.train.world import World

WARM_UP = 2  # updates whose time is not counted


def train_job(job: Sequence[Trial]) -> Iterator[VariantResult]:
    """What a worker process does with a job."""
    for trial in job:
        yield run_variant(trial, executor="local")


def run_variant(trial: Trial, executor: str = "sequential") -> VariantResult:
    """Train one variant to its end, or to the update at which it diverges. A failure of its own is a result too."""
    task = task_of(trial.config)
    started = time.perf_counter()
    losses: List[float] = []
    seen: Dict[str, Any] = {"grad_norms": []}
    valid: Dict[str, float] = {}
    status = error = None
    try:
        valid = _train(trial, task, losses, seen)
    except _Diverged as problem:
        status, error = DIVERGED, str(problem)
    except Interrupted:
        raise
    except Exception as problem:  # whatever it was, the other variants go on, and this one tells
        status, error = FAILED, reason(problem)
    seconds = time.perf_counter() - started
    made = make_result(trial, losses, seconds=seconds, executor=executor, valid=valid, status=status, error=error)
    return VariantResult.of(made, **seen)


def weight_norm(model: nn.Module) -> float:
    """Euclidean norm of all parameters together, in double precision."""
    return sum(float(parameter.detach().double().square().sum()) for parameter in model.parameters()) ** 0.5


class _Diverged(RunError):
    """The engine met numbers that are not finite."""


def _train(trial: Trial, task: Task, losses: List[float], seen: Dict[str, Any]) -> Dict[str, float]:
    """Fills `losses` and `seen`; the validation losses. In the order of a run: model, data, engine, then the seeds."""
    config = trial.config
    world = World.current(config)
    model = build_model(config, task.vocab)
    batches = task.train_batches(config.batch.global_batch, config.seed)
    engine = make_engine(model, config, world)
    seconds: List[float] = []
    try:
        seen["peak_mb"] = peak_megabytes(engine, task.blank(config.batch.micro))
        rng.seed_all(config.seed, 0)
        while len(losses) < config.train.steps:
            rows = [batches.next() for _ in range(engine.updates_per_call)]
            batch = rows[0] if len(rows) == 1 else tuple(np.concatenate(parts) for parts in zip(*rows))
            before = time.perf_counter()
            try:
                result = engine.train_step(batch)
            except DeviceFailure:
                raise
            except RunError as error:
                raise _Diverged(str(error)) from error
            seconds.append(time.perf_counter() - before)
            losses += result.losses or (result.loss,)
            seen["grad_norms"].append(float("nan") if result.grad_norm is None else float(result.grad_norm))
            counted = seconds[WARM_UP:] or seconds
            seen["tokens_per_s"] = result.tokens / statistics.median(counted)
            if diverged_at(losses) is not None:
                return {}
        engine.sync_to_host()
        seen["weight_norm"] = weight_norm(model)
        return evaluate_trained(trial, model, task) if task.validation_names else {}
    finally:
        engine.close()
