"""`train` and `resume`: from a configuration to a trained run directory and its summary."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from ipu_lean.config import Config, Loaded, config_hash, dump_config, require_device
from ipu_lean.data import expected_classes, expected_features
from ipu_lean.data.corpora import absolute_corpus
from ipu_lean.data.images import absolute_images
from ipu_lean.data.labelled import absolute_labelled
from ipu_lean.errors import ConfigError, EnvironmentProblem, Interrupted, IpuLeanError
from ipu_lean.ipu.dist import under_poprun
from ipu_lean.train.checkpoint import CheckpointStore
from ipu_lean.train.engines.protocol import DeviceFailure
from ipu_lean.train.files import read_json, write_atomic
from ipu_lean.train.finish import finish
from ipu_lean.train.loggers import check_loggers, read_metrics
from ipu_lean.train.loop import TrainLoop
from ipu_lean.train.precision import check_precision
from ipu_lean.train.progress import Reporter
from ipu_lean.train.resume import begun_config, resumed_config
from ipu_lean.train.runs import RunDirectory, make_summary
from ipu_lean.train.session import Session
from ipu_lean.train.signals import StopSignal
from ipu_lean.train.world import World

Summary = Dict[str, Any]


def run_train(loaded: Loaded, out: Optional[str] = None, report: Optional[Reporter] = None) -> Summary:
    """Train from the start.

    Args:
        loaded: from `config.load`.
        out: run directory; `runs/NAME-TIME` unless given.
        report: speaks for the run; a Reporter of `logging.progress` unless given.

    Returns:
        The summary that is also in summary.json.

    Raises:
        ConfigError, EnvironmentProblem: before anything was written.
        RunError: non-finite numbers, full disk; the checkpoints so far stand.
        Interrupted: Ctrl-C or SIGTERM; everything is saved, the text is the command that goes on.
    """
    config = with_absolute_paths(loaded.config)
    report = report or Reporter(config.logging.progress)

    def make_run(session: Session) -> RunDirectory:
        RunDirectory.check_free(out)
        session.prepare()
        return RunDirectory.create(out, config.name, dump_config(config))

    return _train("train", config, report, make_run)


def run_resume(run_dir: str, overrides: Sequence[str] = (), report: Optional[Reporter] = None) -> Summary:
    """Go on from the newest whole checkpoint (from the start if there is none), bit for bit.

    Args:
        run_dir: a run directory.
        overrides: `key.path=value` of safe keys (`resume.SAFE`).

    Raises:
        As `run_train`, and ConfigError for a directory that is none or an override that would change what is computed.
    """
    run = RunDirectory.open(run_dir)
    run.check_trained()
    fresh = begins(run)
    config, changed = (begun_config if fresh else resumed_config)(run.config, overrides)
    if fresh:
        config = with_absolute_paths(config)
    report = report or Reporter(config.logging.progress)

    def note_changes() -> None:
        if changed:
            report.line(f"changed for the rest of the run: {', '.join(changed)}")
            write_atomic(run.config, dump_config(config))

    def take_run(session: Session) -> RunDirectory:
        run.lock()
        if fresh:
            run.data.unlink(missing_ok=True)  # of an attempt that made no step, perhaps on another text
        session.run, session.accepted = run, note_changes
        session.prepare()
        return run

    return _train("resume", config, report, take_run)


def begins(run: RunDirectory) -> bool:
    """Whether all that the run holds is weights that no step has touched (`convert`)."""
    store = CheckpointStore(run.checkpoints)
    trainer = read_json(store.path(0) / "trainer.json") if store.steps() == [0] else None
    return bool(trainer and trainer.get("fresh"))


def _train(command: str, config: Config, report: Reporter, take_run: Callable[[Session], RunDirectory]) -> Summary:
    """One attempt, and a second one from the last checkpoint if the device failed in a way that a restart may mend."""
    runs: List[RunDirectory] = []

    def take(session: Session) -> RunDirectory:
        runs[:] = [take_run(session)]
        return runs[0]

    def take_again(session: Session) -> RunDirectory:
        session.run = RunDirectory.open(str(runs[0].path))
        session.prepare()
        return session.run

    try:
        return _attempt(command, config, report, take)
    except DeviceFailure as failure:
        if under_poprun():
            raise  # the other instances wait inside the failed step: only starting all of them again helps
        report.warn(f"warning: {failure} Starting again, once, from the last checkpoint.")
        return _attempt(command, config, report, take_again)


def _attempt(command: str, config: Config, report: Reporter, take_run: Callable[[Session], RunDirectory]) -> Summary:
    """Check the machine, launch, train, write the summary whatever happens."""
    require_device(config)
    check_precision(config)
    check_loggers(config)
    from ipu_lean.train import lit

    lit.planned_size(config)
    started = time.perf_counter()
    first = lit.launched_rank() == 0
    if not first:
        report = Reporter("none")
    outcome: Summary = {}
    with StopSignal() as stop, _speaking(first):
        session = Session(config, report, stop)

        def open_loop(world: World) -> TrainLoop:
            session.open(world)
            session.loop = TrainLoop(session)
            if session.trainer is not None:
                session.loop.restore(session.trainer)
            return session.loop

        def finished(loop: TrainLoop) -> None:
            outcome.update(finish(loop))

        try:
            if first:
                session.run = take_run(session)
                session.run.lock()
            lit.fit(lit.LitTrainer(open_loop, finished, config), config)
            return _end(command, session, outcome, started, None)
        except BaseException as error:
            _end(command, session, outcome, started, error)
            if not first and not lit.under_torchrun() and isinstance(error, IpuLeanError):
                # The first process says it; an exit code from here would make Lightning kill that one in mid-sentence.
                sys.exit(0)
            raise
        finally:
            report.end()
            session.close()
            if session.run is not None:
                session.run.unlock()


def _end(command: str, session: Session, outcome: Summary, started: float, error: Optional[BaseException]) -> Summary:
    """Write summary.json (first process only); raises Interrupted for a run that was stopped and saved."""
    loop, run, config = session.loop, session.run, session.config
    if error is None and loop.interrupted:
        error = Interrupted(
            f"stopped at step {loop.step} of {config.train.steps} and saved; go on with: ipu-lean resume {run.path}"
        )
        status = "interrupted"
    else:
        status = "ok" if error is None else "interrupted" if isinstance(error, (Interrupted, KeyboardInterrupt)) else "failed"
    summary = make_summary(
        command,
        device=config.device,
        config_hash=config_hash(config),
        status=status,
        exit_code=0 if error is None else getattr(error, "exit_code", 1),
        steps=0 if loop is None else loop.step,
        tokens=0 if loop is None else loop.tokens,
        seconds=time.perf_counter() - started,
        metrics=outcome.get("metrics"),
        artifacts=outcome.get("artifacts"),
        error=None if error is None else str(error) or type(error).__name__,
    )
    if run is not None and session.world.first:
        in_vain = command == "train" and _in_vain(session, error)
        gone = in_vain and not run.withdraw(*session.first_files())  # the name is free for the next attempt
        if error is None:
            run.write_summary(summary)
        elif not gone:
            # The disk may be full, which is perhaps why we are here: the first error is the one to tell.
            with contextlib.suppress(IpuLeanError, OSError):
                run.write_summary(summary)
    if isinstance(error, Interrupted) and loop is not None and loop.interrupted:
        raise error
    return summary


def _in_vain(session: Session, error: Optional[BaseException]) -> bool:
    """Whether a new run ended before its first step, by a mistake that only showed then or by Ctrl-C, and holds nothing yet."""
    loop, run = session.loop, session.run
    ended = isinstance(error, (ConfigError, EnvironmentProblem, KeyboardInterrupt)) or (
        isinstance(error, Interrupted) and session.stop.by_hand
    )
    # A second attempt after a device failure may end early as well, beside checkpoints of the first.
    began = loop is not None and loop.step > 0
    return ended and not began and not CheckpointStore(run.checkpoints).steps() and not read_metrics(run.metrics)


@contextlib.contextmanager
def _speaking(first: bool) -> Any:
    """Of several processes only the first has a standard output."""
    if first:
        yield
        return
    before, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115 - for the rest of this process
    try:
        yield
    except BaseException:
        sys.stdout = before
        raise


def with_absolute_paths(config: Config) -> Config:
    """Paths that exist made absolute, and an mlp's number of features or a classifier's of classes written out: the run directory
    can be used from any folder, and needs no second look at the data to know its model.
    """

    def absolute(source: Any) -> Any:
        if config.data.images is not None:
            return absolute_images(source)
        if config.data.labelled is not None:
            return absolute_labelled(source)
        return absolute_corpus(source)

    data, path = config.data, config.data.tokenizer.path
    if path is not None and os.path.exists(path):
        path = str(Path(path).absolute())
    tokenizer = data.tokenizer.model_copy(update={"path": path})
    changes = {
        "corpus": absolute(data.corpus) if data.labelled is None else data.corpus,
        "images": absolute(data.images),
        "labelled": absolute(data.labelled),
        "tokenizer": tokenizer,
        "cache": None if data.cache is None else str(Path(data.cache).expanduser().absolute()),
        "validation": {name: absolute(source) for name, source in data.validation.items()},
    }
    config = config.model_copy(update={"data": data.model_copy(update=changes)})
    if config.data.labelled is not None:
        return config.model_copy(update={"model": config.model.model_copy(update={"classes": expected_classes(config)})})
    if config.data.images is None:
        return config
    model = config.model.model_copy(update={"features": expected_features(config)})
    return config.model_copy(update={"model": model})
