"""Several hosts, as far as one can see without any: stand-ins for popdist and horovod that read the environment poprun makes."""

from __future__ import annotations

import os
import sys
import types
from typing import Any, Callable, Iterator, List, Set

import numpy as np
import pytest

import ipu_lean.ipu.emulator as emulator
from ipu_lean.config import Config
from ipu_lean.errors import ConfigError, EnvironmentProblem, RunError
from ipu_lean.ipu import dist, make_options
from ipu_lean.train.instances import InstanceWorld, world_of
from tests.ipu.helpers import ipu_config

pytestmark = pytest.mark.pod


class FakePopdist(types.ModuleType):
    """The functions of popdist that are used, over PopRun's variables; counts how often it is started."""

    def __init__(self) -> None:
        super().__init__("popdist")
        self.started, self.executed = 0, []

    def isPopdistEnvSet(self) -> bool:
        return "POPDIST_NUM_LOCAL_REPLICAS" in os.environ

    def init(self) -> None:
        self.started += 1

    def getInstanceIndex(self) -> int:
        return int(os.environ["OMPI_COMM_WORLD_RANK"])

    def getNumInstances(self) -> int:
        return int(os.environ["OMPI_COMM_WORLD_SIZE"])

    def getNumTotalReplicas(self) -> int:
        return int(os.environ["POPDIST_NUM_TOTAL_REPLICAS"])

    def execute_on_instances(self, instances: Set[int], action: Callable[[], None]) -> None:
        self.executed.append(set(instances))
        if self.getInstanceIndex() in instances:
            action()


class FakeHorovod(types.ModuleType):
    """Two instances that hold equal numbers."""

    Sum = "sum"

    def __init__(self) -> None:
        super().__init__("horovod.torch")
        self.started = 0

    def init(self) -> None:
        self.started += 1

    def allreduce(self, tensor: Any, op: str) -> Any:
        assert op == "sum"
        return tensor * 2

    def broadcast_object(self, value: Any, root_rank: int) -> Any:
        assert root_rank == 0
        return value if value is not None else "from the first"

    def allgather_object(self, value: Any) -> List[Any]:
        return [value, value]


class PopdistOptions(emulator.Options):
    """Knows replicas and devices by itself, and refuses to be told."""

    def __init__(self, ipus_per_replica: int) -> None:
        super().__init__()
        self.__dict__["ipus_per_replica"] = ipus_per_replica

    def replicationFactor(self, replication_factor: int) -> Any:
        raise RuntimeError("replicationFactor is set by PopRun")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """This process is instance 1 of 2, with 4 replicas in all."""
    values = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "POPDIST_NUM_TOTAL_REPLICAS": "4",
              "POPDIST_NUM_LOCAL_REPLICAS": "2"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    popdist, horovod = FakePopdist(), FakeHorovod()
    own = types.ModuleType("popdist.poptorch")
    own.Options = PopdistOptions  # type: ignore[attr-defined]
    for name, module in {"popdist": popdist, "popdist.poptorch": own, "horovod": types.ModuleType("horovod"),
                         "horovod.torch": horovod}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(dist, "_current", None)
    yield popdist, horovod


def real(**changes: Any) -> Config:
    return ipu_config(device="ipu", batch={"replicas": 4}, **changes)


def test_a_process_of_its_own_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POPDIST_NUM_TOTAL_REPLICAS", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    found = dist.Distribution.current(real())
    assert (found.index, found.size, found.popdist, found.fresh_options) == (0, 1, None, None)
    assert dist.instance_index() == 0


def test_popdist_is_started_once(launched: Any) -> None:
    popdist, horovod = launched
    first, again = dist.Distribution.current(real()), dist.Distribution.current(real())
    assert first is again and (first.index, first.size, first.ipus_per_replica) == (1, 2, 2)
    assert (popdist.started, horovod.started) == (1, 1)
    assert dist.instance_index() == 1 and dist.under_poprun()


def test_the_emulator_is_never_distributed(launched: Any) -> None:
    assert dist.Distribution.current(ipu_config()).popdist is None
    assert launched[0].started == 0


def test_popdists_options_replace_poptorchs(launched: Any) -> None:
    config = real()
    pair = make_options(config, emulator, dist.Distribution.current(config).fresh_options, 2)
    for options in pair:
        assert isinstance(options, PopdistOptions) and options.ipus_per_replica == 2
    assert pair.train.toDict()["gradient_accumulation"] == 5


def test_another_number_of_replicas_is_refused(launched: Any) -> None:
    with pytest.raises(ConfigError, match="--num-replicas 4.*Set it to 4") as caught:
        dist.Distribution.current(ipu_config(device="ipu", batch={"replicas": 2}))
    assert caught.value.key == "batch.replicas"


def test_instances_that_cannot_share_the_replicas(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="3 instances share"):
        dist.Distribution.current(real())


def test_missing_wheels_are_named(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod.torch", None)
    with pytest.raises(EnvironmentProblem, match="horovod"):
        dist.Distribution.current(real())


def test_an_incomplete_environment(launched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POPDIST_NUM_LOCAL_REPLICAS")
    with pytest.raises(EnvironmentProblem, match="incomplete"):
        dist.Distribution.current(real())


def test_the_world_of_instances(launched: Any) -> None:
    popdist, _ = launched
    config = real()
    world = world_of(config)
    assert isinstance(world, InstanceWorld) and (world.rank, world.size, world.first) == (1, 2, False)
    assert world.sum([1.0, 2.5]) == [2.0, 5.0] and world.any(True) and not world.any(False)
    assert world.broadcast(None) == "from the first" and world.gather(7) == [7, 7]
    world.barrier()
    done: List[int] = []
    world.on_first(lambda: done.append(1))
    # Every instance makes the call; only the first one's action runs.
    assert popdist.executed == [{0}] and done == []
    with pytest.raises(RunError, match="from the first"):
        world.agree(None)


def test_each_instance_reads_its_own_replicas(launched: Any) -> None:
    config = real()
    rows = np.arange(config.batch.global_batch, dtype=np.int32)[:, None]
    mine, _ = world_of(config).rows((rows, rows), config)
    micro, replicas = config.batch.micro, 4
    wanted = rows.reshape(config.batch.accumulation, replicas, micro)[:, 2:].reshape(-1, 1)
    assert np.array_equal(mine, wanted)
