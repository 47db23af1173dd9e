"""What one process holds while it trains: data, model, engine, run directory; built in an order that lets mistakes surface
first.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

import torch

from ipu_lean.config import Config
from ipu_lean.errors import CheckpointError, ConfigError
from ipu_lean.ipu.plan.advice import plan_lines, warning
from ipu_lean.models import build_model
from ipu_lean.train import rng
from ipu_lean.train import snapshot as snapshots
from ipu_lean.train.banner import banner, flat, versions
from ipu_lean.train.checkpoint import CheckpointStore
from ipu_lean.train.engines import make_engine
from ipu_lean.train.engines.protocol import Engine
from ipu_lean.train.files import write_atomic
from ipu_lean.train.loggers import MetricsLog
from ipu_lean.train.progress import Reporter
from ipu_lean.train.resume import unsafe
from ipu_lean.train.runs import RunDirectory
from ipu_lean.train.signals import StopSignal
from ipu_lean.train.tasks import Task, open_task
from ipu_lean.train.world import World


class Session:
    """One process's parts of a run. `prepare` needs no other process; `open` is called in all of them at once."""

    def __init__(self, config: Config, report: Reporter, stop: StopSignal) -> None:
        self.config, self.report, self.stop = config, report, stop
        self.world = World()
        self.run: Optional[RunDirectory] = None
        self.task: Optional[Task] = None
        self.model: Any = None
        self.log: Any = None
        self.trainer: Optional[Dict[str, Any]] = None
        self.engine: Optional[Engine] = None
        self.loop: Any = None
        self.accepted: Callable[[], None] = lambda: None  # called once checkpoint and data fit, before anything is written

    def prepare(self) -> None:
        """Data and model: everything that can be wrong about a configuration shows here. Done once."""
        if self.model is not None:
            return
        if self.config.train.threads is not None:
            torch.set_num_threads(self.config.train.threads)
        record = None if self.run is None else self.run.data
        self.task = open_task(self.config, self.report.preparing, record)
        self.vocab = self.task.vocab
        self.model = build_model(self.config, self.vocab)

    def open(self, world: World) -> None:
        """Join the others: agree on the run directory and on the checkpoint to go on from, wrap the model, restore.
        Collective.
        """
        self.world = world
        path = world.broadcast(None if self.run is None else str(self.run.path))
        self.run = self.run or RunDirectory.open(path)
        self.prepare()
        self.store = CheckpointStore(self.run.checkpoints, self.report.warn)
        self.batches = self.task.train_batches()
        source = self._checkpoint()
        snapshot = None if source is None else snapshots.read(source)
        started = snapshot is not None and not snapshot.trainer.get("fresh")  # fresh: weights alone, from `convert`
        if started:
            self._check(snapshot.trainer)
        if snapshot is not None:
            snapshots.load_into(self.model, snapshot.model, source)
        self.engine = make_engine(self.model, self.config, world, self.report.line)
        if started:
            self.trainer = snapshot.trainer
            self.engine.load_optimizer_state(snapshot.optimizer)
            self.engine.load_state_dict(snapshot.trainer["engine"])
            self.batches.load_state_dict(snapshot.trainer["data"])
        if world.first:
            self.accepted()
            if not self.run.data.exists():
                self.task.note(self.run.data)
            self.log = MetricsLog(self.run, self.config, 0 if self.trainer is None else self.trainer["step"])
            for name, text in self.engine.describe().items():
                write_atomic(self.run.path / name, text)
            self._speak(source)

    def _checkpoint(self) -> Any:
        """The newest whole checkpoint, chosen by the first process; newer damaged ones are put aside."""
        source = None
        if self.world.first:
            self.store.clean()
            source = self.store.latest()
            self.store.put_aside_after(source)
        return self.world.broadcast(source)

    def _check(self, trainer: Dict[str, Any]) -> None:
        """Refuse to go on with another configuration or text; mention other versions, which may round differently."""
        for key in unsafe(trainer["config"], flat(self.config)):
            raise ConfigError(
                f"config.yaml was edited: the checkpoint was trained with {trainer['config'].get(key)!r}",
                key=key,
                value=flat(self.config).get(key),
                suggestion="put it back, or start a new run",
            )
        if trainer["corpus"] != self.task.fingerprint():
            raise CheckpointError(
                "the checkpoint was trained on other data (or another split of it) than this run directory names."
            )
        before = trainer["config"]["device"]
        if before != self.config.device and self.world.first:
            self.report.warn(f"warning: the run goes on on {self.config.device} after {before}: the same up to rounding.")
        if trainer["versions"] != versions() and self.world.first:
            then, now = (", ".join(f"{key} {value}" for key, value in one.items()) for one in (trainer["versions"], versions()))
            self.report.warn(f"warning: the checkpoint was written with {then}; this is {now}. The run goes on, not bit for bit.")

    def first_files(self) -> Tuple[str, ...]:
        """Names of what `open` writes into the run directory before the first step."""
        described = () if self.engine is None else self.engine.describe()
        return (".lock", "data.json", "metrics.jsonl", "metrics.csv", "tensorboard", *described)

    def restore_rng(self) -> None:
        """Put every generator where it stood (or seed it); called last, right before the first step."""
        states = [] if self.trainer is None else self.trainer["rng"]
        if len(states) == self.world.size:
            rng.restore(states[self.world.rank], self.world.device)
            return
        # A new run, or another number of processes than the checkpoint had: fresh, but not the streams that the run began with.
        rng.seed_all(self.config.seed + (0 if self.trainer is None else 1000003 * self.trainer["step"]), self.world.rank)

    def _speak(self, source: Any) -> None:
        self.report.line(f"run directory: {self.run.path}")
        for text in banner(self.config, self.model, self.vocab, self.world):
            self.report.line(text)
        table = self.engine.describe().get("ipu_placement.txt")
        if table is not None:
            self.report.line(table.rstrip())
            for text in plan_lines(self.config):
                self.report.line(text)
            too_full = warning(self.config)
            if too_full is not None:
                self.report.warn(too_full)
        if source is not None:
            self.report.line(f"going on from {source.name}")

    def close(self) -> None:
        """Close files and give the engine's memory back."""
        if self.log is not None:
            self.log.close()
        if self.engine is not None:
            self.engine.close()
