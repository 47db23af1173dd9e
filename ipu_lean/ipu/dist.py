"""Several hosts: one process ("instance") on each, started by Graphcore's `poprun`, talking through PopDist and Horovod.

PopRun describes the run in POPDIST_* variables; PopDist reads them. Its options replace PopTorch's and bring the number of
replicas. Nothing here is imported, and nothing happens, in a process that poprun did not start.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Callable, List, Optional

from ipu_lean.config import Config
from ipu_lean.config.layout import layout
from ipu_lean.errors import ConfigError, EnvironmentProblem

MARK = "POPDIST_NUM_TOTAL_REPLICAS"
_current: Optional[Distribution] = None


class Distribution:
    """This instance among all of them; `popdist` None for a process on its own."""

    def __init__(self, popdist: Any = None, horovod: Any = None, ipus_per_replica: int = 1) -> None:
        self.popdist, self.horovod, self.ipus_per_replica = popdist, horovod, ipus_per_replica
        self.index = 0 if popdist is None else int(popdist.getInstanceIndex())
        self.size = 1 if popdist is None else int(popdist.getNumInstances())

    @classmethod
    def current(cls, config: Config) -> Distribution:
        """The same object at each call: PopDist and Horovod are started once.

        Raises:
            EnvironmentProblem: started by poprun, and popdist or horovod cannot be imported.
            ConfigError: poprun's replicas are not the configuration's, or the instances cannot share them.
        """
        global _current
        if config.device != "ipu" or not under_poprun():
            return cls()
        if _current is None:
            _current = cls(*_start(), layout(config).ipus)
        _current._check(config)
        return _current

    def _check(self, config: Config) -> None:
        total = int(self.popdist.getNumTotalReplicas())
        if total != config.batch.replicas:
            raise ConfigError(
                f"poprun was started with --num-replicas {total}",
                key="batch.replicas",
                value=config.batch.replicas,
                suggestion=f"set it to {total}, or poprun's to {config.batch.replicas}",
            )
        if total % self.size:
            raise ConfigError(
                f"{self.size} instances share the replicas evenly, so their number must divide this",
                key="batch.replicas",
                value=total,
                suggestion="change poprun's --num-instances",
            )

    @property
    def fresh_options(self) -> Optional[Callable[[], Any]]:
        """Makes PopDist's options, which know replicas and devices; None where PopTorch's own are right."""
        if self.popdist is None:
            return None
        kind = importlib.import_module("popdist.poptorch").Options
        return lambda: kind(ipus_per_replica=self.ipus_per_replica)

    # -- between instances; every one of them makes each call ------------------------------------------------------------
    def sum(self, values: List[float]) -> List[float]:
        """Element-wise sum, in float64."""
        import torch

        total = self.horovod.allreduce(torch.tensor(values, dtype=torch.float64), op=self.horovod.Sum)
        return [float(value) for value in total]

    def broadcast(self, value: Any) -> Any:
        """The first instance's object."""
        return self.horovod.broadcast_object(value, root_rank=0)

    def gather(self, value: Any) -> List[Any]:
        """Every instance's object, by index."""
        return list(self.horovod.allgather_object(value))

    def on_first(self, action: Callable[[], None]) -> None:
        """Run `action` on the first instance. Behind a bare `if` the instances' programs would get different numbers."""
        self.popdist.execute_on_instances({0}, action)


def under_poprun() -> bool:
    """Whether poprun started this process."""
    return MARK in os.environ


def instance_index() -> int:
    """This process's number as poprun's environment has it, before anything is started; 0 without poprun."""
    if not under_poprun():
        return 0
    return int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))


def _start() -> Any:
    """(popdist, horovod), both initialised."""
    try:
        popdist = importlib.import_module("popdist")
        horovod = importlib.import_module("horovod.torch")
    except ImportError as problem:
        raise EnvironmentProblem(
            f"poprun started this process, and {problem.name or problem} cannot be imported. popdist and horovod are wheels of "
            "the Poplar SDK; install them beside PopTorch (docs/ipu.md)."
        ) from problem
    if not popdist.isPopdistEnvSet():
        raise EnvironmentProblem("poprun's environment is incomplete: popdist does not recognise it.")
    popdist.init()
    horovod.init()
    return popdist, horovod
