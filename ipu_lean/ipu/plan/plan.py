"""A plan: every IPU's memory, the pipeline, the batch, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

from ipu_lean.ipu.plan.machine import worse
from ipu_lean.ipu.plan.memory import IpuMemory, StageMemory, ipu_memory, stage_memory
from ipu_lean.ipu.plan.pipeline import bubble, forward_stages, minimum_accumulation
from ipu_lean.ipu.plan.workload import Workload


@dataclass(frozen=True)
class Plan:
    """What a workload needs.

    Attributes:
        forward: F, forward stages. needed: accumulation that training needs. idle: share of an update in which stages wait, at
            the accumulation that is given or needed, whichever is larger (0 in inference).
    """

    workload: Workload
    stages: List[StageMemory]
    ipus: List[IpuMemory]
    forward: int
    needed: int
    idle: float

    @property
    def verdict(self) -> str:
        """That of the worst IPU: fits, tight or no."""
        found = "fits"
        for row in self.ipus:
            found = worse(found, row.verdict)
        return found

    @property
    def fullest(self) -> IpuMemory:
        """The IPU that holds most before temporaries."""
        return max(self.ipus, key=lambda row: row.before)

    @property
    def guilty(self) -> Optional[IpuMemory]:
        """The fullest of the IPUs that do not fit; None if all do."""
        over = [row for row in self.ipus if row.verdict != "fits"]
        return max(over, key=lambda row: row.after) if over else None


def make_plan(workload: Workload) -> Plan:
    """Everything from formulas; takes well under a millisecond."""
    forward = forward_stages(workload)
    needed = minimum_accumulation(forward) if workload.training else 1
    idle = bubble(forward, max(needed, workload.accumulation)) if workload.training else 0.0
    return Plan(workload, stage_memory(workload), ipu_memory(workload), forward, needed, idle)
