"""The Ray executor on a real cluster of two worker processes, one of which is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter

import pytest

from ipu_lean.errors import ConfigError, EnvironmentProblem
from ipu_lean.sweep.jobs import Job
from ipu_lean.sweep.ray_workers import OBJECT_STORE, import_ray, run_ray
from ipu_lean.sweep.trial import run_trial
from tests.sweep.grids import grid_of
from tests.sweep.ray_helpers import Noting, Refusing, Sleeping, begun

new_enough = pytest.mark.skipif(sys.version_info < (3, 9), reason="there is no Ray for this Python")


@pytest.mark.pod
@pytest.mark.skipif(sys.version_info >= (3, 9), reason="Ray runs on this Python")
def test_an_old_python_is_told():
    with pytest.raises(EnvironmentProblem, match="newer than 3.8"):
        import_ray()


@new_enough
def test_missing_ray_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EnvironmentProblem, match=r"ipu_lean\[ray\]"):
        run_ray([], None, 1, print)


@pytest.fixture(scope="module")
def cluster():
    """The address of a cluster on this machine: two nodes with one worker process each. Nothing runs inside this process."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    import_ray()
    from ray.cluster_utils import Cluster

    size = {"num_cpus": 1, "object_store_memory": OBJECT_STORE}
    own = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    own.add_node(**size)
    yield own.address
    own.shutdown()


@new_enough
def test_a_killed_worker_costs_nothing_but_its_trial(cluster, tmp_path):
    trials = grid_of(tmp_path, lrs=[1e-3, 2e-3, 4e-3, 8e-3, 1e-2], seeds=[0], train={"steps": 60})
    results, killed = [], []

    def on_result(result):
        results.append(result)
        if len(results) == 1:  # one worker is in the middle of another trial
            process, trial = [(process, trial) for process, trial in begun(tmp_path) if trial != result.id][-1]
            os.kill(process, signal.SIGKILL)
            killed.append((process, trial))

    run_ray([Job([trial]) for trial in trials], cluster, 2, on_result, train=Noting(tmp_path))
    assert Counter(result.id for result in results) == Counter(trial.id for trial in trials)
    times = Counter(trial for _, trial in begun(tmp_path))
    assert times == {trial.id: 2 if trial.id == killed[0][1] else 1 for trial in trials}
    assert len({process for process, _ in begun(tmp_path)}) >= 2
    for result in results:
        (trial,) = [trial for trial in trials if trial.id == result.id]
        assert (result.status, result.executor) == ("done", "ray")
        assert result.losses == pytest.approx(run_trial(trial).losses, rel=1e-6)


@pytest.fixture(scope="class")
def connected(cluster):
    """The cluster, with this process connected to it: its workers stay, and have loaded what they need, from test to test."""
    import ray

    ray.init(address=cluster, log_to_driver=False, logging_level="ERROR")
    yield cluster
    ray.shutdown()


@new_enough
class TestInOneConnection:
    def test_a_trial_that_kills_its_worker_twice_fails_alone(self, connected, tmp_path):
        first, fatal, last = trials = grid_of(tmp_path, lrs=[1e-3, 4e-3, 1e-2], seeds=[0])
        results = []
        run_ray([Job(trials)], connected, 2, results.append, train=Noting(tmp_path, fatal=fatal.id))
        assert results[0].id == first.id
        assert {result.id: result.status for result in results} == {first.id: "done", fatal.id: "failed", last.id: "done"}
        (error,) = [result.error for result in results if result.id == fatal.id]
        assert "lost" in error
        assert Counter(trial for _, trial in begun(tmp_path)) == {first.id: 1, fatal.id: 2, last.id: 1}

    def test_what_holds_for_every_trial_is_raised_here(self, connected, tmp_path):
        trials = grid_of(tmp_path, lrs=[1e-3], seeds=[0])
        with pytest.raises(ConfigError, match="no such corpus") as caught:
            run_ray([Job(trials)], connected, 2, print, train=Refusing())
        assert caught.value.key == "data.corpus"

    def test_stop_gives_up_what_is_under_way(self, connected, tmp_path):
        trials = grid_of(tmp_path, lrs=[1e-3, 1e-2], seeds=[0, 1])
        results = []
        asked = []

        def stop():
            asked.append(len(begun(tmp_path)))
            return asked[-1] > 0

        run_ray([Job([trial]) for trial in trials], connected, 1, results.append, stop, Sleeping(tmp_path))
        assert results == [] and len(begun(tmp_path)) == 1


@new_enough
def test_without_an_address_a_cluster_is_started_and_ended(tmp_path):
    ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
    trials = grid_of(tmp_path, lrs=[1e-3, 1e-2], seeds=[0])
    results = []
    run_ray([Job(trials)], None, 2, results.append)
    assert [result.id for result in results] == [trial.id for trial in trials]
    assert {result.executor for result in results} == {"batched"} and not ray.is_initialized()
