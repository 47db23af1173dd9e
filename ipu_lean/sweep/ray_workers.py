"""A sweep's jobs on the workers of a Ray cluster: one that runs already, or one started here. The only module that imports Ray.

The contract is `run_local`'s: results come one by one, in the order in which they are reached; a worker that dies costs only the
trials that it was at, and those are tried once more.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections import deque
from typing import Any, Callable, Deque, Dict, Iterable, Iterator, List, NamedTuple, Optional

from ipu_lean.errors import EnvironmentProblem, IpuLeanError
from ipu_lean.sweep.grid import Trial
from ipu_lean.sweep.jobs import Job, iter_job
from ipu_lean.sweep.results import TrialResult

EXECUTOR = "ray"
TRIES = 2
POLL = 0.5  # seconds between two looks at `stop`
OBJECT_STORE = 128 * 2**20  # bytes; Ray would take a third of the memory, and trials and results are small
Train = Callable[[Job], Iterable[TrialResult]]


class _Flight(NamedTuple):
    """A job under way: what is left of it by trial id, how often it was begun, and Ray's stream of its results."""

    left: Dict[str, Trial]
    tries: int
    stream: Any


def run_ray(
    jobs: Iterable[Job],
    address: Optional[str],
    workers: int,
    on_result: Callable[[TrialResult], None],
    stop: Callable[[], bool] = lambda: False,
    train: Optional[Train] = None,
) -> None:
    """Run all jobs, `workers` at a time, each with one CPU.

    Args:
        address: of a running cluster (`auto`, `HOST:6379`, `ray://HOST:10001`), whose machines have this package and see the data
            under the same paths; None starts a cluster of `workers` processes on this machine and ends it afterwards.
        on_result: called here with each result as it comes.
        stop: asked about twice a second; once it says yes, what is under way is given up.
        train: a job to its results; default `iter_job`.
    Raises:
        EnvironmentProblem: Ray is not installed, does not run on this Python, or the cluster cannot be reached.
        ConfigError, EnvironmentProblem: what a worker says holds for every trial.
    """
    ray = import_ray()
    waiting: Deque[Any] = deque((Job(job, getattr(job, "probe", False)), 1) for job in jobs)
    with _cluster(ray, address, workers):
        remote = ray.remote(num_cpus=1, max_retries=0, num_returns="streaming")(_train)
        flights: List[_Flight] = []
        while waiting or flights:
            while waiting and len(flights) < workers:
                job, tries = waiting.popleft()
                flights.append(_Flight({trial.id: trial for trial in job}, tries, remote.remote(job, train)))
            if stop():
                for flight in flights:
                    with contextlib.suppress(ray.exceptions.RayError, TypeError, ValueError):
                        ray.cancel(flight.stream, force=True)
                return
            ready, _ = ray.wait([flight.stream for flight in flights], timeout=POLL, fetch_local=False)
            for flight in [flight for flight in flights if any(flight.stream is stream for stream in ready)]:
                if not _take(ray, flight, on_result):
                    flights = [other for other in flights if other is not flight]
                    _again(flight, waiting, on_result)


def import_ray() -> Any:
    """Ray, or an EnvironmentProblem that says how to get it."""
    if sys.version_info < (3, 9):
        raise EnvironmentProblem(
            f"Ray needs a Python newer than 3.8, and this is {sys.version_info[0]}.{sys.version_info[1]}. "
            "`sweep.executor: local` needs nothing, and scripts/ has job arrays for Slurm."
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster started here reports to nobody
    try:
        import ray
    except ImportError as problem:
        raise EnvironmentProblem(
            f"`sweep.executor: ray` needs Ray, which cannot be imported here ({problem}). Install the extra: "
            "`pip install 'ipu_lean[ray]'`; `sweep.executor: local` needs nothing."
        ) from problem
    return ray


@contextlib.contextmanager
def _cluster(ray: Any, address: Optional[str], workers: int) -> Iterator[None]:
    """A connection to the cluster, ended afterwards unless it was there before."""
    if ray.is_initialized():
        yield
        return
    # `local` starts one even where another is running on this machine.
    own = {"address": "local", "num_cpus": workers, "include_dashboard": False, "object_store_memory": OBJECT_STORE}
    options = own if address is None else {"address": address}
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, OSError, RuntimeError, ValueError) as problem:
        where = "on this machine" if address is None else f"at {address}"
        raise EnvironmentProblem(f"no Ray cluster {where}: {' '.join(str(problem).split())}") from problem
    try:
        yield
    finally:
        ray.shutdown()


def _train(job: Job, train: Optional[Train]) -> Iterator[TrialResult]:
    """In a worker: the results of a job, as a stream."""
    import torch

    torch.set_num_threads(1)
    # Ray sends values into its generators, and `yield from` would hand them on to a list's iterator, which takes none.
    for result in iter_job(job, EXECUTOR) if train is None else train(job):  # noqa: UP028
        yield result


def _take(ray: Any, flight: _Flight, on_result: Callable[[TrialResult], None]) -> bool:
    """Hand over the next result of a stream that has something; False once it has ended, well or not."""
    try:
        result = ray.get(next(flight.stream))
    except StopIteration:
        return False
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, IpuLeanError):
            raise error.cause from None
        raise
    except ray.exceptions.RayError:
        return False  # the worker, or its machine, is gone
    if flight.left.pop(result.id, None) is not None:
        on_result(result)
    return True


def _again(flight: _Flight, waiting: Deque[Any], on_result: Callable[[TrialResult], None]) -> None:
    """What a stream ended without goes back to the queue, once, and one by one: together they may have been too large, and a
    trial that ends its worker shall not take others along."""
    from ipu_lean.sweep.trial import failed_result

    if flight.left and flight.tries < TRIES:
        waiting.extend((Job([trial]), flight.tries + 1) for trial in flight.left.values())
        return
    for trial in flight.left.values():
        on_result(failed_result(trial, f"the worker that trained it was lost, {TRIES} times", EXECUTOR))
