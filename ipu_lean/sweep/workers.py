"""A sweep's jobs on worker processes of this machine, each with one thread: two of them beat two threads in one process by far.

Results come one by one, as they are reached. A worker that dies (killed, out of memory) costs only the trials that it was at, and
those are tried once more by another one. Workers end when the process that started them does, however that ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, Optional, Tuple

from ipu_lean.errors import IpuLeanError
from ipu_lean.sweep.grid import Trial
from ipu_lean.sweep.jobs import Job, iter_job
from ipu_lean.sweep.results import TrialResult

EXECUTOR = "local"
TRIES = 2
POLL = 0.5  # seconds between two looks at `stop`
Train = Callable[[Job], Iterable[TrialResult]]
Message = Tuple[str, Any]
"""What a worker says: ("result", TrialResult), ("done", None) after a job, ("problem", an error that holds for all trials), or
("broke", text) when a job ended in a way that concerns its own trials only."""


class _Worker:
    """A process, the pipe to it, and what is left of the job that it is at."""

    def __init__(self, context: Any, train: Optional[Train]) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, train), daemon=True)
        try:
            with _one_thread(), _deaf():
                self.process.start()
        except BaseException:  # a Ctrl-C that was held back is raised at the end of `_deaf`
            if self.process.pid is not None:
                self.end()
            raise
        theirs.close()  # so that the pipe ends when the worker does
        self.left: Dict[str, Trial] = {}
        self.tries, self.busy = 0, False

    def give(self, job: Job, tries: int) -> None:
        """A job to begin. A worker that is gone already is noticed when it is listened to."""
        self.left, self.tries, self.busy = {trial.id: trial for trial in job}, tries, True
        with contextlib.suppress(OSError):
            self.pipe.send(job)

    def end(self) -> None:
        """At once, whatever it is doing."""
        self.pipe.close()
        self.process.kill()
        self.process.join()


def run_local(
    jobs: Iterable[Job],
    workers: int,
    on_result: Callable[[TrialResult], None],
    stop: Callable[[], bool] = lambda: False,
    train: Optional[Train] = None,
) -> None:
    """Run all jobs, `workers` at a time.

    Args:
        on_result: called here with each result as it comes.
        stop: asked about twice a second; once it says yes, what is under way is given up.
        train: a job to its results, importable by name; default `iter_job`.
    Raises:
        ConfigError, EnvironmentProblem: what a worker says holds for every trial.
    """
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads and locks in whatever state they are
    waiting: Deque[Tuple[Job, int]] = deque((Job(job, getattr(job, "probe", False)), 1) for job in jobs)
    pool: List[_Worker] = []
    try:
        while waiting or any(worker.busy for worker in pool):
            _deal(waiting, pool, workers, context, train)
            if stop():
                return
            listening = {worker.pipe: worker for worker in pool}
            for pipe in wait(list(listening), timeout=POLL):
                worker = listening[pipe]
                if not _listen(worker, on_result):
                    pool.remove(worker)
                    worker.process.join()
                    _again(worker, waiting, on_result)
                    worker.end()
    finally:
        for worker in pool:
            worker.end()


def _deal(waiting: Deque[Tuple[Job, int]], pool: List[_Worker], workers: int, context: Any, train: Optional[Train]) -> None:
    """Give every worker that has nothing to do a job, and start workers while there are more jobs than of those."""
    for worker in pool:
        if not worker.busy and waiting:
            worker.give(*waiting.popleft())
    while waiting and len(pool) < workers:
        pool.append(_Worker(context, train))
        pool[-1].give(*waiting.popleft())


def _listen(worker: _Worker, on_result: Callable[[TrialResult], None]) -> bool:
    """One message of a worker; False if it is gone. Raises what the worker says holds for every trial."""
    try:
        kind, content = worker.pipe.recv()
    except (EOFError, OSError):
        return False
    if kind == "result":
        if worker.left.get(content.id) is not None:
            on_result(content)
            del worker.left[content.id]
    elif kind == "problem":
        raise content
    else:
        for trial in worker.left.values():
            on_result(_failed(trial, content or "its job ended without it"))
        worker.left, worker.busy = {}, False
    return True


def _again(worker: _Worker, waiting: Deque[Tuple[Job, int]], on_result: Callable[[TrialResult], None]) -> None:
    """What a worker died over goes back to the queue, once, and one by one: a program that was too large, or one trial that ends
    its worker, then fails alone.
    """
    if worker.tries < TRIES:
        waiting.extend((Job([trial]), worker.tries + 1) for trial in worker.left.values())
        return
    code = worker.process.exitcode
    how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
    for trial in worker.left.values():
        on_result(_failed(trial, f"the worker that trained it died ({how}), {TRIES} times"))


def _failed(trial: Trial, error: str) -> TrialResult:
    from ipu_lean.sweep.trial import failed_result

    return failed_result(trial, error, EXECUTOR)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """What is started inside computes with one thread, from its first import on."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """A process that is started inside does not hear Ctrl-C from its first instruction on, which goes to all processes of a
    terminal: one that is still importing would print a traceback. This process hears it a moment later.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    # Its start takes SIGINT out of the mask (CPython, multiprocessing/resource_tracker.py), so it must run before.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# -- in the worker -----------------------------------------------------------------------------------------------------
def _work(pipe: Connection, train: Optional[Train]) -> None:
    """Jobs from the pipe until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all; the process that started us decides
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # `_deaf` blocked it, and what a worker starts inherits that
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    from ipu_lean.sweep.trial import reason

    torch.set_num_threads(1)
    while True:
        try:
            job = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            for result in iter_job(job, EXECUTOR) if train is None else train(job):
                pipe.send(("result", result))
            message: Message = ("done", None)
        except IpuLeanError as problem:
            message = ("problem", problem)
        except Exception as problem:
            message = ("broke", reason(problem))
        pipe.send(message)


def _end_with_parent() -> None:
    """A parent that was killed closes nothing: without this, the worker would train on to the end of its job."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
