"""`sweep`: from a configuration with axes to trials, a table, plots, and a verdict on the learning rate's transfer."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

import torch

from ipu_lean.config import Config, Loaded, SweepConfig, require_device
from ipu_lean.data import expected_vocab
from ipu_lean.errors import ConfigError, Interrupted
from ipu_lean.models import build_meta
from ipu_lean.optim import build_schedule
from ipu_lean.sweep.directory import SweepDirectory, check_same_base, try_to_write
from ipu_lean.sweep.finish import judge_all, make_partial_summary, make_sweep_summary
from ipu_lean.sweep.grid import LR, SEED, Trial, expand, extended
from ipu_lean.sweep.jobs import Job, iter_job, plan_jobs
from ipu_lean.sweep.progress import SweepProgress
from ipu_lean.sweep.results import DIVERGED, TrialResult
from ipu_lean.sweep.trial import with_share
from ipu_lean.sweep.workers import run_local
from ipu_lean.train.commands import with_absolute_paths
from ipu_lean.train.precision import check_precision
from ipu_lean.train.signals import StopSignal
from ipu_lean.train.tasks import Progress, open_task

Summary = Dict[str, Any]
Say = Callable[[str], None]


def run_sweep(
    loaded: Loaded,
    out: Optional[str] = None,
    *,
    share: Optional[Tuple[int, int]] = None,
    plan_only: bool = False,
    strict: bool = False,
    say: Say = lambda text: None,
) -> Summary:
    """Run every trial of `loaded.config.sweep` and judge them.

    Args:
        out: the directory; `runs/NAME-sweep-TIME` unless given. share: (K, N) runs every N-th trial and judges nothing.
        plan_only: make the directory and run nothing. strict: an inconclusive verdict fails as well.

    Raises:
        ConfigError, EnvironmentProblem: before anything was written.
        RunError: no trial came to an end, so there is nothing to judge.
        VerdictFailed: the learning rate does not transfer; everything is in the directory all the same.
        Interrupted: Ctrl-C or SIGTERM; the text is the command that goes on.
    """
    SweepDirectory.check_free(out)
    config = with_absolute_paths(loaded.config).model_copy(update={"study": None})  # by which `made_by` tells the two
    trials = _trials(config)
    check_trials(trials)
    check_executor(trials, config.sweep or SweepConfig())
    check_data(trials[0].config, _stages(say))
    run = SweepDirectory.begin(out, config)
    return _sweep(run, config, trials, share=share, plan_only=plan_only, strict=strict, say=say)


def resume_sweep(
    directory: str,
    loaded: Loaded,
    *,
    share: Optional[Tuple[int, int]] = None,
    plan_only: bool = False,
    retry: bool = False,
    strict: bool = False,
    say: Say = lambda text: None,
) -> Summary:
    """Go on with a sweep: trials that have a result are not repeated. Where nothing is left to run, neither device nor data are
    needed, and a directory that cannot be written is judged and shown all the same.

    Args:
        loaded: the directory's configuration with overrides, which may change the `sweep` section. An axis that is
            given is added to what is there: a sweep grows and does not shrink.
        retry: run again what failed (diverged is a result).

    Raises:
        As `run_sweep`, ConfigError where something else than the axes has changed, and EnvironmentProblem where trials are left
        to run and the directory cannot be written.
    """
    run = SweepDirectory.reopen(directory)
    old = _read(run)
    config = with_absolute_paths(loaded.config).model_copy(update={"study": None})
    check_same_base(old, config)
    config = extended(old, config)
    trials = _trials(config)
    locks = [run.lock] if share is None else []  # before anything changes under another process's hands
    what = f"the sweep in {run.path} does not grow"
    if config != old:
        try_to_write(False, what, *locks, lambda: _take_over(run, trials, old.sweep or SweepConfig()))
    left = bool(_left(run, trials, retry))
    if left:
        check_trials(trials, shapes=config != old)
        check_executor(trials, config.sweep or SweepConfig())
    if config != old:
        try_to_write(left, what, *locks, lambda: run.keep(config))
    return _sweep(run, config, trials, share=share, plan_only=plan_only, retry=retry, strict=strict, say=say)


def check_trials(trials: Sequence[Trial], shapes: bool = True) -> None:
    """Everything that can be wrong about a trial before its data is read: device, precision, and muP's base for one trial of each
    shape (`shapes`: unless that was seen to before).
    """
    first = trials[0].config
    require_device(first)
    check_precision(first)
    build_schedule(first)
    seen = set()
    for trial in trials if shapes else ():
        shape = tuple((name, repr(value)) for name, value in trial.axes.items() if name not in ("lr", "seed"))
        if shape not in seen:
            seen.add(shape)
            build_meta(trial.config, expected_vocab(trial.config))


def check_executor(trials: Sequence[Trial], sweep: SweepConfig) -> None:
    """EnvironmentProblem if Ray is wanted and missing; ConfigError if these trials are to be trained together and cannot."""
    if sweep.executor == "ray":
        from ipu_lean.sweep.ray_workers import import_ray

        import_ray()
    elif sweep.executor == "batched":
        plan_jobs(trials, sweep.executor, sweep.workers)


def check_data(config: Config, progress: Optional[Progress] = None) -> None:
    """ConfigError for data that is not there, or that is less than one batch of it."""
    open_task(config, progress).train_batches(config.batch.global_batch)


def _trials(config: Config) -> List[Trial]:
    sweep = config.sweep or SweepConfig()
    trials = expand(config, sweep)
    if len(trials) < 2:
        raise ConfigError(
            "there is nothing to sweep over: no axis has two values",
            key="sweep",
            suggestion=f"give axes, for example `--widths 64..256 --lrs 2^-10..2^-4 --seeds 2` ({LR} and {SEED} have one value)",
        )
    return trials


def _left(run: SweepDirectory, trials: Sequence[Trial], retry: bool) -> List[Trial]:
    """Those that must run."""
    done = run.store.done_ids(retry)
    return [trial for trial in trials if trial.id not in done]


def _take_over(run: SweepDirectory, trials: Sequence[Trial], old: SweepConfig) -> None:
    """Another `final_share` is another mean of losses that are all kept, so no trial runs again for it. For what `evaluate` adds
    trials do: it takes weights, and those are gone.
    """
    for trial in trials:
        former = replace(trial, final_share=old.final_share, evaluate=old.evaluate)
        result = run.store.get(former.id) if former.id != trial.id and run.store.get(trial.id) is None else None
        if result is not None and (old.evaluate or not trial.evaluate or result.status == DIVERGED):
            run.store.add(with_share(trial, result))


def _read(run: SweepDirectory) -> Config:
    from ipu_lean.config import load_config

    return load_config(run.config)


def _sweep(
    run: SweepDirectory,
    config: Config,
    trials: List[Trial],
    *,
    share: Optional[Tuple[int, int]],
    plan_only: bool,
    strict: bool,
    say: Say,
    retry: bool = False,
) -> Summary:
    """Run what has no result yet; then judge, unless this is a share."""
    started = time.perf_counter()
    mine = trials if share is None else trials[share[0] :: share[1]]
    left = _left(run, mine, retry)
    if not plan_only:
        locks = [run.lock] if share is None else []
        what = f"{len(left)} of {len(mine)} trials are left to run in {run.path}, and could not be kept"
        try_to_write(bool(left), what, *locks, run.store.check_writable)
    try:
        left = _left(run, mine, retry)  # while the directory is ours
        todo = [] if plan_only else left
        say(_announcement(run, config, mine, len(mine) - len(left), plan_only))
        stopped = f"stopped; finished trials are kept. Go on with: ipu-lean sweep {shlex.quote(str(run.path))}"
        if left:
            with StopSignal(stopped):
                run.task(trials[0].config, _stages(say))
        if todo:
            with StopSignal(stopped), SweepProgress(len(todo), config.logging.progress, say) as progress:

                def on_result(result: TrialResult) -> None:
                    run.store.add(result)
                    progress.result(result)

                _execute(todo, config.sweep or SweepConfig(), on_result)
        seconds = time.perf_counter() - started
        if share is not None or plan_only:
            return make_partial_summary(run, config, mine, seconds)
        return judge_all(run, config, trials, seconds, strict, say)
    except (Interrupted, KeyboardInterrupt) as problem:
        if share is None:
            seconds = time.perf_counter() - started
            run.write_summary(make_sweep_summary(config, seconds, status="interrupted", exit_code=130, error=str(problem)))
        raise
    finally:
        run.unlock()


def _execute(trials: Sequence[Trial], sweep: SweepConfig, on_result: Callable[[TrialResult], None]) -> None:
    """All trials by the chosen executor."""
    jobs: Iterable[Job] = plan_jobs(trials, sweep.executor, sweep.workers)
    if sweep.executor == "sequential":
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as every worker has it: the same bits, and small models are faster so
        try:
            for job in jobs:
                for result in iter_job(job, "sequential"):
                    on_result(result)
        finally:
            torch.set_num_threads(threads)
    elif sweep.executor == "ray":
        from ipu_lean.sweep.ray_workers import run_ray

        run_ray(jobs, sweep.ray_address, sweep.workers, on_result)
    else:
        run_local(jobs, sweep.workers, on_result)


def _stages(say: Say) -> Progress:
    """Says each stage of preparing the text once."""
    told: List[str] = []

    def progress(stage: str, done: int, total: Optional[int]) -> None:
        if stage not in told:
            told.append(stage)
            say(f"preparing the corpus: {stage}")

    return progress


def _announcement(run: SweepDirectory, config: Config, trials: Sequence[Trial], done: int, plan_only: bool) -> str:
    sweep = config.sweep or SweepConfig()
    axes: Dict[str, List[Any]] = {}
    for trial in trials:
        for name, value in trial.axes.items():
            if value not in axes.setdefault(name, []):
                axes[name].append(value)
    grid = " x ".join(f"{len(values)} {name}" for name, values in axes.items() if len(values) > 1)
    lines = [f"sweep directory: {run.path}", f"{len(trials)} trials ({grid}), {done} of them finished before"]
    if not plan_only and done < len(trials):
        hands = "this process" if sweep.executor == "sequential" else f"{sweep.workers} workers"
        lines += [f"executor {sweep.executor}, {hands}; {config.train.steps} updates a trial"]
    return "\n".join(lines)
