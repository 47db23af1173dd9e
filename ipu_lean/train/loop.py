"""The training loop: one call of `advance` is one call of the engine, and whatever is due after it.

Nothing here knows Lightning; `lit.py` calls it. Order within a step: train, log, evaluate, save. So a checkpoint of step k lies
behind every record of step k, and a run resumed from it repeats none and misses none.
"""

from __future__ import annotations

import math
import shlex
import time
from typing import Any, Dict, Optional

import numpy as np

from ipu_lean.config import config_hash
from ipu_lean.errors import IpuLeanError, RunError
from ipu_lean.mup import roles_to_json
from ipu_lean.train import rng
from ipu_lean.train.banner import flat, versions
from ipu_lean.train.engines.protocol import Batch, DeviceFailure, StepResult
from ipu_lean.train.evaluate import evaluate_all
from ipu_lean.train.progress import Speed
from ipu_lean.train.session import Session
from ipu_lean.train.snapshot import Snapshot

TRAINER_SCHEMA = 1


class TrainLoop:
    """Counts steps (weight updates), and holds what a checkpoint must remember besides the engine's state."""

    def __init__(self, session: Session) -> None:
        self.session, self.config = session, session.config
        self.step, self.tokens = 0, 0
        self.best: Optional[Dict[str, Any]] = None
        self.last_train: Optional[StepResult] = None
        self.evaluated: Dict[str, Dict[str, Any]] = {}
        self.interrupted = False
        self.speed = Speed()
        self.started = time.perf_counter()

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self.interrupted or self.step >= self.config.train.steps

    def begin(self) -> None:
        """Right before the first step of this process."""
        session = self.session
        session.restore_rng()
        session.stop.begin(lambda: bool(session.store.steps()))
        if session.world.first:
            if self.step >= self.config.train.steps:
                more = f"ipu-lean resume {shlex.quote(str(session.run.path))} train.steps={2 * self.step}"
                session.report.line(f"already finished: {self.step} of {self.config.train.steps} steps; to go on: {more}")
            session.report.begin(self.step, self.config.train.steps)
        self.started = time.perf_counter()

    def advance(self) -> Optional[StepResult]:
        """One engine call and what follows it; None if the run is done already."""
        if self.done:
            return None
        session, config = self.session, self.config
        waited = time.perf_counter()
        batch = self._rows()
        waited = time.perf_counter() - waited
        try:
            result = session.engine.train_step(batch)
        except DeviceFailure:
            raise
        except RunError as error:
            raise RunError(self._explain(error)) from error
        self.step += session.engine.updates_per_call
        self.tokens += result.tokens
        self.last_train = result
        self.speed.add(result.tokens, waited)
        before = self.step - session.engine.updates_per_call
        every = config.train.log_every
        log = before == 0 or self.step // every > before // every or self.step >= config.train.steps
        if session.world.first:
            session.report.step(self.step, config.train.steps, result, self.speed, log)
            if log:
                self._log(result)
        pause = time.perf_counter()
        self._after()
        self.speed.pause(time.perf_counter() - pause)
        return result

    def _rows(self) -> Batch:
        """This process's rows for one engine call: a global batch for each update in it, in order."""
        session = self.session
        batches = [session.world.rows(session.batches.next(), self.config) for _ in range(session.engine.updates_per_call)]
        if len(batches) == 1:
            return batches[0]
        return np.concatenate([tokens for tokens, _ in batches]), np.concatenate([labels for _, labels in batches])

    def _after(self) -> None:
        """Evaluation, checkpoint and stop, where they are due. A run stops where an IPU call would end, so that any device can
        go on from there.
        """
        train = self.config.train
        stop = self.session.world.any(self.session.stop.requested)
        stop = stop and self.step % self.config.batch.device_iterations == 0
        last = self.step >= train.steps
        improved = False
        if self.session.task.validation_names and (last or (train.eval_every and self.step % train.eval_every == 0)):
            improved = self.evaluate()
        if last or stop or improved or self.step % train.save_every == 0:
            self.save()
        self.interrupted = stop and not last

    def evaluate(self) -> bool:
        """Evaluate every set; True if the first one's loss is the lowest so far and that checkpoint is wanted."""
        session = self.session
        self.evaluated = evaluate_all(session.engine, session.task, session.world)
        for name, metrics in self.evaluated.items():
            if session.world.first:
                session.report.evaluation(self.step, self.config.train.steps, name, metrics)
                session.log.write({"step": self.step, "split": name, **metrics, "time": _now()})
        name, first = next(iter(self.evaluated.items()))
        if not math.isfinite(first["loss"]) or (self.best is not None and first["loss"] >= self.best["loss"]):
            return False
        self.best = {"set": name, "loss": first["loss"], "step": self.step}
        return self.config.train.keep_best

    def save(self) -> None:
        """A checkpoint of this step; older ones go as `train.keep_last` and `train.keep_best` say. Collective."""
        session = self.session
        model, optimizer = session.engine.sync_to_host(), session.engine.optimizer_state()
        states = session.world.gather(rng.capture(session.world.device))
        error: Optional[Exception] = None

        def write() -> None:
            nonlocal error
            try:
                self._write(model, optimizer, states)
            except IpuLeanError as problem:
                error = problem

        session.world.on_first(write)
        session.world.agree(error)

    def _write(self, model: Any, optimizer: Any, states: Any) -> None:
        """The checkpoint's files, and which of the older ones stay."""
        session, train = self.session, self.config.train
        tokenizer = session.task.tokenizer
        save = None if tokenizer is None else tokenizer.save
        roles = roles_to_json(session.model.roles)
        session.store.write(self.step, Snapshot(model, optimizer, self.trainer_state(states), roles, save))
        best = self.best["step"] if self.best is not None and train.keep_best else None
        if best == self.step:
            session.store.mark_best(best)
        session.store.prune(train.keep_last, best)

    def trainer_state(self, states: Any) -> Dict[str, Any]:
        """The content of trainer.json; `states` is the RNG state of each process."""
        session = self.session
        return {
            "schema": TRAINER_SCHEMA,
            "step": self.step,
            "tokens": self.tokens,
            "best": self.best,
            "engine": session.engine.state_dict(),
            "data": session.batches.state_dict(),
            "corpus": session.task.fingerprint(),
            "vocab": session.vocab,
            "world": session.world.size,
            "config_hash": config_hash(self.config),
            "config": flat(self.config),
            "versions": versions(),
            "rng": states,
        }

    def restore(self, trainer: Dict[str, Any]) -> None:
        """Counters from a checkpoint's trainer.json (the session restores engine, data and RNG)."""
        self.step, self.tokens, self.best = trainer["step"], trainer["tokens"], trainer["best"]

    def _log(self, result: StepResult) -> None:
        self.session.log.write(
            {
                "step": self.step,
                "split": "train",
                "loss": result.loss,
                "lr": result.lr,
                "grad_norm": result.grad_norm,
                "tokens": self.tokens,
                "tokens_per_s": self.speed.tokens_per_s,
                "data_wait": self.speed.data_wait,
                "time": _now(),
            }
        )

    def _explain(self, error: RunError) -> str:
        """The engine's message, and what is left to go back to."""
        steps = self.session.store.steps()
        kept = f"the last good checkpoint is {self.session.store.path(steps[-1])}" if steps else "there is no checkpoint yet"
        advice = "a lower optimizer.lr, a longer schedule.warmup or train.clip may help"
        return f"{error} The run stopped and this step was not saved; {kept}; {advice}."


def _now() -> float:
    return round(time.time(), 3)
