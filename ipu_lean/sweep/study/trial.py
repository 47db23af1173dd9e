"""One variant with one seed, in this process: the numbers of `train`, and beside them gradient norms, memory and speed."""

from __future__ import annotations

import statistics
import time
from typing import Any, Dict, Iterator, List, Sequence

from torch import nn

from ipu_lean.models import build_model
from ipu_lean.sweep.grid import Trial
from ipu_lean.sweep.study.peak import peak_megabytes
from ipu_lean.sweep.study.result import VariantResult
from ipu_lean.sweep.trial import diverged_at, ended, evaluate_trained, next_batch, step, task_of
from ipu_lean.train import rng
from ipu_lean.train.engines import make_engine
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
    seen: Dict[str, Any] = {"grad_norms": []}
    made = ended(trial, lambda losses: _train(trial, task, losses, seen), executor)
    return VariantResult.of(made, **seen)


def weight_norm(model: nn.Module) -> float:
    """Euclidean norm of all parameters together, in double precision."""
    return sum(float(parameter.detach().double().square().sum()) for parameter in model.parameters()) ** 0.5


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
            batch = next_batch(engine, batches)
            before = time.perf_counter()
            result = step(engine, batch)
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
