"""Many trials of one shape trained in one program: `run_ensemble` gives what `run_trial` gives, faster where models are small.

Weights are stacked to `[K, *shape]`; one program makes the gradients of all (program.py) and one update changes all (updates.py).
What is a number of the update (learning rate, decay, eps, clip, schedule) or of the first weights (seed, init scale) differs from
trial to trial; what is written into the forward pass is equal (alike.py). Nothing couples the trials: one that diverges is left
behind with its step on record, and the others go on without it.
"""

from __future__ import annotations

import math
import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch

from ipu_lean.errors import ConfigError, RunError
from ipu_lean.models import TrainStep, build_model
from ipu_lean.optim import build_optimizer, build_schedule, settings_by_name
from ipu_lean.sweep.alike import batchable, program_key
from ipu_lean.sweep.grid import Trial
from ipu_lean.sweep.program import StackedGradient, Tensors, plain_config
from ipu_lean.sweep.results import DIVERGED, TrialResult
from ipu_lean.sweep.trial import DIVERGED_MULTIPLE, evaluate_trained, failed_result, make_result, task_of
from ipu_lean.sweep.updates import make_update
from ipu_lean.train.gradients import CLIP_EPS
from ipu_lean.train.tasks import Task

EXECUTOR = "batched"
PREFIX = "model."  # TrainStep holds the model under this name
PROGRAMS_KEPT = 8
_programs: Dict[Any, StackedGradient] = {}


class Member:
    """One trial on its way.

    Attributes:
        losses: so far, one an update.
        ended: it diverged, and is left out of what follows. problem: in words, where numbers were not finite.
    """

    def __init__(self, trial: Trial) -> None:
        self.trial, self.config = trial, trial.config
        self.schedule = build_schedule(trial.config)
        self.losses: List[float] = []
        self.ended, self.problem = False, None  # type: bool, Optional[str]


class Ensemble:
    """K trials in one program.

    Args:
        trials: of one shape (`batchable`), at least one.
        task: their data (`train.tasks.open_task`).

    Raises:
        ConfigError: the trials cannot share a program; the text names the first key that keeps them apart.
    """

    def __init__(self, trials: Sequence[Trial], task: Task) -> None:
        reason = batchable(trials)
        if reason is not None:
            raise ConfigError(f"these trials cannot be trained as one program: {reason}")
        self.task, self.config = task, trials[0].config
        self.members = [Member(trial) for trial in trials]
        self.rows = list(self.members)  # who is in which row of the stacks
        self.step = 0
        self.started, self.step_seconds = time.perf_counter(), math.inf  # the second: of the last update
        self.program: Optional[StackedGradient] = None
        settings = self._build()
        self.update = make_update(self.config.optimizer.kind, self.weights, settings)
        seeds = sorted({member.config.seed for member in self.members})
        self.orders = {seed: task.train_batches(self.config.batch.global_batch, seed) for seed in seeds}

    def _build(self) -> List[Dict[str, Any]]:
        """Stacks every trial's weights and buffers; returns their optimizers' settings. One model is alive at a time."""
        weights: Tensors = {}
        buffers: Tensors = {}
        settings = []
        for row, member in enumerate(self.members):
            model = build_model(plain_config(member.config), self.task.vocab)
            found = settings_by_name(model.named_parameters(), build_optimizer(model, member.config))
            settings.append({PREFIX + name: own for name, own in found.items()})
            for stacks, tensors in ((weights, model.named_parameters()), (buffers, model.named_buffers())):
                for name, tensor in tensors:
                    if row == 0:
                        stacks[PREFIX + name] = torch.empty((len(self.members), *tensor.shape), dtype=tensor.dtype)
                    stacks[PREFIX + name][row] = tensor.detach()
            if row == 0:
                self.template = TrainStep(model.train())
        self.weights = weights
        self.shared = {name: stack[0].clone() for name, stack in buffers.items() if bool((stack == stack[:1]).all())}
        self.own = {name: stack for name, stack in buffers.items() if name not in self.shared}
        return settings

    # -- training ----------------------------------------------------------------------------------------------------------
    @property
    def done(self) -> bool:
        """Whether no trial has an update left to make."""
        return self.step >= self.config.train.steps or not any(self._alive())

    def _alive(self) -> List[bool]:
        return [not member.ended for member in self.rows]

    def advance(self) -> None:
        """One weight update of every trial that still trains."""
        started = time.perf_counter()
        losses, gradients = self._gradients(*self._batch())
        each = torch.stack([torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients])
        norms = torch.linalg.vector_norm(each, dim=0)
        self.step += 1
        for member, loss, norm in zip(self.rows, losses, norms.tolist()):
            if not member.ended:
                self._record(member, loss, norm)
        gradients = self._clipped(gradients, norms)
        iterations = self.config.batch.device_iterations
        factors = [member.schedule.lr_at(self.step - 1, iterations) for member in self.rows]
        self.update.step(gradients, factors, self._alive())
        self.step_seconds = time.perf_counter() - started
        self._shrink()

    def _batch(self) -> Tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels of one global batch for every row, `[K, rows, ...]`; trials of one seed read the same order."""
        found = {seed: order.next() for seed, order in self.orders.items()}
        pairs = [found[member.config.seed] for member in self.rows]
        inputs, labels = (torch.from_numpy(np.stack([pair[i] for pair in pairs])) for i in (0, 1))
        return inputs, labels

    def _gradients(self, inputs: torch.Tensor, labels: torch.Tensor) -> Tuple[List[float], List[torch.Tensor]]:
        """(mean losses, mean gradients `[K, *shape]`) over the micro-batches, summed first and divided once as the engines do."""
        micro = self.config.batch.micro
        count = inputs.shape[1] // micro
        if self.program is None:
            self.program = self._program(inputs[:, :micro], labels[:, :micro])
        total: List[torch.Tensor] = []
        losses = torch.zeros(len(self.rows), dtype=torch.float64)
        for x, y in zip(inputs.split(micro, 1), labels.split(micro, 1)):
            loss, gradients = self.program(self.weights, self.shared, self.own, x, y)
            losses += loss
            total = list(torch._foreach_add(total, gradients)) if total else gradients
        if count > 1:
            total = list(torch._foreach_div(total, float(count)))
        return (losses / count).tolist(), total

    def _program(self, inputs: torch.Tensor, labels: torch.Tensor) -> StackedGradient:
        """The traced program, kept for ensembles of the same shape that follow in this process."""
        key = (program_key(self.config), tuple(inputs.shape), tuple(self.own))
        if key not in _programs:
            _programs[key] = StackedGradient(self.template, self.weights, self.shared, self.own, inputs, labels)
            while len(_programs) > PROGRAMS_KEPT:
                del _programs[next(iter(_programs))]
        return _programs[key]

    def _record(self, member: Member, loss: float, norm: float) -> None:
        """Take note of a step of one trial: its loss, and whether this step was its last."""
        if not math.isfinite(loss):
            member.problem = f"the loss is {loss} at step {self.step}."
        elif not math.isfinite(norm):
            member.problem = f"the gradient's norm is {norm} at step {self.step}."
        else:
            member.losses.append(loss)
        member.ended = member.problem is not None or loss > DIVERGED_MULTIPLE * member.losses[0]

    def _clipped(self, gradients: List[torch.Tensor], norms: torch.Tensor) -> List[torch.Tensor]:
        """Each trial's gradients multiplied by what brings their global norm down to its `train.clip`."""
        largest = [math.inf if member.config.train.clip is None else member.config.train.clip for member in self.rows]
        factors = (torch.tensor(largest) / (norms + CLIP_EPS)).clamp(max=1.0)
        if not bool((factors < 1.0).any()):
            return gradients
        return [gradient * factors.view((-1,) + (1,) * (gradient.dim() - 1)) for gradient in gradients]

    def _shrink(self) -> None:
        """Leave diverged trials out of the stacks once that saves more than tracing the program anew costs."""
        alive = [row for row, member in enumerate(self.rows) if not member.ended]
        if not alive or 2 * len(alive) > len(self.rows) or self.program is None:
            return
        saved = (self.config.train.steps - self.step) * self.step_seconds * (1 - len(alive) / len(self.rows))
        if saved > 2 * self.program.seconds:
            self.keep(alive)

    def keep(self, rows: List[int]) -> None:
        """Go on with these rows of the stacks only."""
        index = torch.tensor(rows)
        self.rows = [self.rows[row] for row in rows]
        for stacks in (self.weights, self.own):
            for name, stack in stacks.items():
                stacks[name] = stack.index_select(0, index)
        self.update.keep(rows)
        self.program = None

    # -- what comes of it --------------------------------------------------------------------------------------------------
    def trained(self, member: Member) -> torch.nn.Module:
        """The model of one trial with its present weights."""
        row = self.rows.index(member)
        model = build_model(member.config, self.task.vocab)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.weights[PREFIX + name][row])
        return model

    def results(self) -> List[TrialResult]:
        """The record of every trial, in the order in which they were given."""
        asked = [member for member in self.members if member.trial.evaluate and not member.ended]
        valid = {id(member): evaluate_trained(member.trial, self.trained(member), self.task) for member in asked}
        seconds = (time.perf_counter() - self.started) / len(self.members)
        return [
            make_result(
                member.trial,
                member.losses,
                seconds=seconds,
                executor=EXECUTOR,
                valid=valid.get(id(member)),
                status=None if member.problem is None else DIVERGED,
                error=member.problem,
            )
            for member in self.members
        ]


def run_ensemble(trials: Sequence[Trial], task: Optional[Task] = None) -> List[TrialResult]:
    """Train these trials as one program, each to its end or to the update at which it diverges.

    The losses are those of `run_trial` up to rounding (1e-5 relative, while a trial is not chaotic).

    Args:
        trials: all of one shape (`batchable`).
        task: their data, from `task_of`; opened here unless given.
    Returns:
        A result for each, in order. What goes wrong with the whole program (memory) is the failure of each.
    Raises:
        ConfigError: the trials cannot share a program, or none of them could be trained at all.
    """
    task = task_of(trials[0].config) if task is None else task
    try:
        together = Ensemble(trials, task)
    except (MemoryError, RuntimeError) as problem:
        return _failures(trials, problem)
    return finish(together)


def finish(ensemble: Ensemble) -> List[TrialResult]:
    """Train on to the end; results as `run_ensemble`'s."""
    try:
        while not ensemble.done:
            ensemble.advance()
        return ensemble.results()
    except (RunError, MemoryError, RuntimeError) as problem:
        return _failures([member.trial for member in ensemble.members], problem)


def _failures(trials: Sequence[Trial], problem: BaseException) -> List[TrialResult]:
    text = " ".join(str(problem).split()) or type(problem).__name__
    return [failed_result(trial, text, EXECUTOR) for trial in trials]
