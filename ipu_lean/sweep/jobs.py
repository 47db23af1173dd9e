"""Which trials go together: a job is what one worker is given at a time, one trial or several that may share a program.

`plan_jobs` only counts; what is close is settled by the worker itself, which times a few steps of both ways (probe.py) before it
trains. A program's gain levels off at a few dozen trials (benchmarks/sweep.py), and its memory grows with each.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Sequence

from ipu_lean.errors import ConfigError
from ipu_lean.sweep import cost
from ipu_lean.sweep.alike import program_key, unfit
from ipu_lean.sweep.grid import Trial
from ipu_lean.sweep.results import TrialResult

TOGETHER = 32  # trials in a program at most
FEWEST = 8  # a program with fewer is worth it only where workers would be idle otherwise
MEMORY_SHARE = 0.5  # of what is free, for all workers together
WORTH_A_PROBE = 1.5e9  # arithmetic of a micro-batch (about 20 ms on one core) beyond which calls cost nothing to speak of
FIXED = ("sequential", "local")  # executors that run one trial at a time


class Job(List[Trial]):
    """Trials for one worker. `probe`: try out whether to train them together; otherwise they are."""

    def __init__(self, trials: Sequence[Trial], probe: bool = False) -> None:
        super().__init__(trials)
        self.probe = probe

    def __reduce__(self) -> Any:
        return Job, (list(self), self.probe)


def plan_jobs(
    trials: Sequence[Trial], executor: str, workers: int, probe: bool = True, memory: Optional[int] = None
) -> List[Job]:
    """Jobs that together hold every trial once, the longest first so that the workers end at about the same time.

    Args:
        executor: `sequential` and `local` run trials one by one; `batched` trains together whatever can be; `auto` and `ray` do
            so where it may be faster, and then find out.
        probe: whether `auto` and `ray` find out; without, they train together what may gain.
        memory: bytes that all workers may use; default: half of what is free.

    Raises:
        ConfigError: `batched`, and a trial that cannot be trained with others (the text says why).
    """
    if executor in FIXED or not trials:
        return [Job([trial]) for trial in trials]
    groups: Dict[str, List[Trial]] = {}
    jobs: List[Job] = []
    for trial in trials:
        reason = unfit(trial.config)
        if reason is not None and executor == "batched":
            raise ConfigError(
                f"these trials cannot be trained together: {reason}",
                key="sweep.executor",
                value=executor,
                suggestion="use `local`, or `auto`, which trains together what can be",
            )
        if reason is not None or (executor != "batched" and not _may_gain(trial)):
            jobs.append(Job([trial]))
        else:
            groups.setdefault(program_key(trial.config), []).append(trial)
    pieces = [piece for group in groups.values() for piece in _cut(group, workers, memory)]
    while pieces and len(pieces) + len(jobs) < workers and max(map(len, pieces)) > 1:
        longest = max(pieces, key=len)
        pieces.remove(longest)
        pieces += [longest[: len(longest) // 2], longest[len(longest) // 2 :]]
    jobs += [Job(piece, probe and executor != "batched" and len(piece) > 1) for piece in pieces]
    return sorted(jobs, key=_length, reverse=True)


def _may_gain(trial: Trial) -> bool:
    """Whether calls could be a visible part of a step's time."""
    micro_batches = trial.config.batch.accumulation * trial.config.batch.replicas
    return cost.work(trial.config) / micro_batches < WORTH_A_PROBE


def _cut(group: List[Trial], workers: int, memory: Optional[int]) -> List[List[Trial]]:
    """A group in pieces of about equal size: one for each worker unless they would be small, more where memory asks for it."""
    count = len(group)
    size = min(TOGETHER, max(FEWEST, -(-count // workers)), together_in_memory(group[0], workers, memory))
    number = -(-count // size)
    bounds = [count * i // number for i in range(number + 1)]
    return [group[start:stop] for start, stop in zip(bounds, bounds[1:])]


def together_in_memory(trial: Trial, workers: int, memory: Optional[int] = None) -> int:
    """How many trials like this one fit into one worker's part of the memory, at least one."""
    free = cost.available_bytes() if memory is None else memory
    if free is None:
        return TOGETHER
    usable = free * MEMORY_SHARE if memory is None else free
    return max(1, int(usable / workers // cost.bytes_each(trial.config)))


def _length(job: Job) -> float:
    return sum(cost.work(trial.config) * trial.config.train.steps for trial in job)


# -- in the worker -------------------------------------------------------------------------------------------------------------
def run_job(job: Sequence[Trial]) -> List[TrialResult]:
    """All results of a job, in the order of its trials."""
    found: Dict[str, TrialResult] = {result.id: result for result in iter_job(job)}
    return [found[trial.id] for trial in job]


def iter_job(job: Sequence[Trial], executor: str = "local") -> Iterator[TrialResult]:
    """The results of a job, each as soon as it is there. Trains in this process; a trial's own failure is a result.

    Args:
        executor: noted in the results of trials that are trained one by one.
    """
    from ipu_lean.sweep.probe import run_probed
    from ipu_lean.sweep.trial import run_trial

    if len(job) == 1:
        yield run_trial(job[0], executor=executor)
    else:
        yield from run_probed(job, getattr(job, "probe", False), executor)
