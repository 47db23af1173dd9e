"""How long an update takes, relative to other plans of the network: floating-point work by stage, and the pipeline's bubble."""

from __future__ import annotations

from typing import Dict

from ipu_lean.ipu.plan.pipeline import Stage, forward_stages, route
from ipu_lean.ipu.plan.workload import Workload

RATE = 80e12  # useful fp16 operations a second on an IPU: a third of the peak of a GC200. It scales all plans alike.


def stage_operations(workload: Workload, stage: Stage) -> int:
    """Operations of one micro-batch's forward pass: two for each weight and token, and attention's two products."""
    network = workload.network
    full = 4 * network.seq * network.hidden if network.heads else 0
    chunked = [network.chunked[number] if network.chunked else None for number in stage.layers]
    attention = sum(full if layer is None else layer.work for layer in chunked)
    readout = 2 * network.hidden * network.vocab * workload.labels if stage.heads else 0
    return workload.tokens * (2 * max(network.layers) * len(stage.layers) + attention) + readout


def update_seconds(workload: Workload) -> float:
    """Seconds of one update. Forward, twice as much backward, and forward again where it is recomputed (not for the loss)."""
    passes = 4 if workload.recomputed else 3
    busy: Dict[int, float] = {}
    for stage in route(workload):
        busy[stage.ipu] = busy.get(stage.ipu, 0.0) + stage_operations(workload, stage) * passes / RATE
    forward = forward_stages(workload)
    if forward == 1:  # one IPU, or one after another
        return workload.accumulation * sum(busy.values())
    return (workload.accumulation + 2 * forward - 2) * max(busy.values())


def samples_per_second(workload: Workload) -> float:
    """Rows of all replicas."""
    return workload.global_batch / update_seconds(workload)
