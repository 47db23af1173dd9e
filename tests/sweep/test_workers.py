"""Worker processes: every result once, whatever dies."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ipu_lean.config import SweepConfig
from ipu_lean.errors import ConfigError
from ipu_lean.sweep.grid import expand
from ipu_lean.sweep.jobs import Job
from ipu_lean.sweep.trial import make_result, run_trial
from ipu_lean.sweep.workers import _Worker, run_local
from tests.sweep.helpers import tiny

pytestmark = pytest.mark.pod
ROOT = Path(__file__).parents[2]


def pretend(job):
    """Losses that say which process made them."""
    for trial in job:
        yield make_result(trial, [float(os.getpid()), trial.axes["lr"]], seconds=0.0, executor="local")


def dies_once(job):
    """Dies at the second of three trials, once."""
    for index, trial in enumerate(job):
        mark = Path(trial.config.data.cache) / "died"
        if index == 1 and len(job) == 3 and not mark.exists():
            mark.parent.mkdir(exist_ok=True)
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield from pretend([trial])


def always_dies(job):
    if job[0].axes["lr"] == 0.01:
        os._exit(9)
    yield from pretend(job)


def breaks(job):
    yield from pretend(job[:1])
    raise ValueError("a bug")


def holds_for_all(job):
    raise ConfigError("no trial can have this", key="data.corpus")


def sleeps(job):
    (Path(job[0].config.data.cache) / f"sleeps-{os.getpid()}").touch()
    time.sleep(60)
    return iter(())


@pytest.fixture
def trials(tmp_path):
    return expand(tiny(tmp_path), SweepConfig(lrs=[0.01, 0.02, 0.04, 0.08, 0.16]))


def run(jobs, train, workers=2, stop=lambda: False):
    found = []
    run_local(jobs, workers, found.append, stop, train)
    return {result.id: result for result in found}, found


def test_workers_give_the_numbers_of_this_process(trials):
    alone = [run_trial(trial) for trial in trials[:3]]
    found, results = run([Job([trial]) for trial in trials[:3]], None)
    assert len(results) == 3 and all(found[one.id].losses == one.losses for one in alone)
    assert {result.executor for result in results} == {"local"}


def test_every_trial_once_on_two_processes(trials):
    found, results = run([Job(trials[:2]), *(Job([trial]) for trial in trials[2:])], pretend)
    assert len(results) == 5 and set(found) == {trial.id for trial in trials}
    assert len({result.losses[0] for result in results}) == 2
    assert os.getpid() not in {result.losses[0] for result in results}


def test_a_killed_worker_costs_nothing_but_time(trials):
    found, results = run([Job(trials[:3]), Job(trials[3:])], dies_once)
    assert len(results) == 5 and all(result.status == "done" for result in results)
    first, *rest = (found[trial.id].losses[0] for trial in trials[:3])
    assert all(process != first for process in rest)  # what was handed over before the death was not repeated


def test_a_job_that_kills_its_workers_fails_and_the_others_go_on(trials):
    found, results = run([Job([trial]) for trial in trials], always_dies)
    assert len(results) == 5
    bad = found[trials[0].id]
    assert bad.status == "failed" and "died (exit code 9), 2 times" in bad.error
    assert all(found[trial.id].status == "done" for trial in trials[1:])


def test_a_bug_in_a_job_fails_what_it_left(trials):
    found, _ = run([Job(trials[:2]), Job(trials[2:3])], breaks, workers=1)
    assert [found[trial.id].status for trial in trials[:3]] == ["done", "failed", "done"]
    assert "ValueError: a bug (test_workers.py" in found[trials[1].id].error


def test_what_holds_for_all_trials_is_raised(trials):
    with pytest.raises(ConfigError, match="data.corpus"):
        run([Job([trial]) for trial in trials], holds_for_all)


def test_a_worker_that_is_starting_does_not_hear_ctrl_c(trials):
    """It used to end with a traceback, while it imported; what the parent gets is the parent's matter."""
    worker = _Worker(multiprocessing.get_context("spawn"), pretend)
    try:
        for _ in range(20):
            os.kill(worker.process.pid, signal.SIGINT)
            time.sleep(0.01)
        worker.give(Job(trials[:1]), 1)
        kind, result = worker.pipe.recv()
        assert kind == "result" and result.id == trials[0].id
    finally:
        worker.end()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_a_ctrl_c_that_was_held_back_leaves_no_worker_behind(trials, monkeypatch):
    started = []

    def start(process):
        before(process)
        started.append(process)
        os.kill(os.getpid(), signal.SIGINT)

    context = multiprocessing.get_context("spawn")
    before = context.Process.start
    monkeypatch.setattr(context.Process, "start", start)
    with pytest.raises(KeyboardInterrupt):
        run_local([Job(trials[:1])], 1, print, train=pretend)
    assert len(started) == 1 and not started[0].is_alive()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def sleepers(folder):
    return [int(path.name.split("-")[1]) for path in folder.glob("sleeps-*")]


def test_stop_ends_the_workers_at_once(trials, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir(exist_ok=True)
    started = time.monotonic()
    assert run([Job([trial]) for trial in trials], sleeps, stop=lambda: len(sleepers(cache)) == 2) == ({}, [])
    assert time.monotonic() - started < 50
    assert wait_for(lambda: not any(map(alive, sleepers(cache))))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
def test_workers_end_with_a_parent_that_was_killed(tmp_path):
    tiny(tmp_path)
    (tmp_path / "cache").mkdir(exist_ok=True)
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(
            f"""
            from pathlib import Path
            from ipu_lean.config import SweepConfig
            from ipu_lean.sweep.grid import expand
            from ipu_lean.sweep.jobs import Job
            from ipu_lean.sweep.workers import run_local
            from tests.sweep.helpers import tiny
            from tests.sweep.test_workers import sleeps

            if __name__ == "__main__":
                trials = expand(tiny(Path({str(tmp_path)!r})), SweepConfig(lrs=[0.01, 0.02]))
                run_local([Job([trial]) for trial in trials], 2, print, train=sleeps)
            """
        )
    )
    parent = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        assert wait_for(lambda: len(sleepers(tmp_path / "cache")) == 2)
    finally:
        parent.kill()
        parent.wait()
    assert wait_for(lambda: not any(map(alive, sleepers(tmp_path / "cache"))), 20)
