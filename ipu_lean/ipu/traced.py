"""The plan again, from the traced step in place of formulas: real shapes, real types, what the operations really save."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, List, Tuple

from ipu_lean.config import Config
from ipu_lean.data import blank_batch, expected_vocab
from ipu_lean.errors import ConfigError, RunError
from ipu_lean.ipu.api import load_poptorch
from ipu_lean.ipu.emulator.examine import Report, examine
from ipu_lean.ipu.emulator.kept import kept_for_backward
from ipu_lean.ipu.emulator.stages import StageKept, kept_by_stage
from ipu_lean.ipu.emulator.trace import Trace
from ipu_lean.ipu.options import make_options
from ipu_lean.ipu.placement import place
from ipu_lean.ipu.plan.memory import IpuMemory
from ipu_lean.ipu.plan.plan import Plan
from ipu_lean.ipu.step import to_precision
from ipu_lean.ipu.surrogate import make_step
from ipu_lean.models import build_meta


def traced_plan(plan: Plan, config: Config) -> Plan:
    """`plan` with the bytes of its IPUs taken from the trace; stages and settings are the same.

    Args:
        config: as an IPU would run it (`as_ipu`).
    Raises:
        RunError: the step cannot be traced (`check` says why).
        ConfigError: a surrogate step on several IPUs, whose walk back visits them again.
    """
    if plan.workload.surrogate:
        return replace(plan, ipus=[_surrogate(plan, config)])
    found = kept_by_stage(*_trace(config), expected_vocab(config))
    ipus = [_ipu(row, plan, found) for row in plan.ipus]
    return replace(plan, ipus=ipus)


def compare(plan: Plan, traced: Plan) -> List[Dict[str, Any]]:
    """One row an IPU: bytes before temporaries by formula and by trace, and their difference relative to the larger."""
    rows = []
    for mine, theirs in zip(plan.ipus, traced.ipus):
        most = max(mine.before, theirs.before, 1)
        rows.append({"ipu": mine.ipu, "formula": mine.before, "traced": theirs.before,
                     "difference": (theirs.before - mine.before) / most})
    return rows


def format_comparison(plan: Plan, traced: Plan) -> str:
    """Both estimates beside each other, as text."""
    lines = [f"{'IPU':>5} {'formulas MiB':>13} {'traced MiB':>11} {'difference':>11}   before temporaries"]
    for row in compare(plan, traced):
        numbers = f"{row['formula'] / 2**20:>13.1f} {row['traced'] / 2**20:>11.1f}"
        lines.append(f"{row['ipu']:>5} {numbers} {100 * row['difference']:>+10.1f} %")
    return "\n".join([*lines, f"verdict of the traced step: {traced.verdict}"])


def _surrogate(plan: Plan, config: Config) -> IpuMemory:
    """The forward pass holds the backward pass: the most that is alive in it, and the gradients that it hands over."""
    if len(plan.ipus) > 1:
        raise ConfigError(
            "a surrogate step on several IPUs visits each twice, which the trace does not tell apart",
            key="--traced",
            suggestion="leave it out, or plan one IPU",
        )
    kept = kept_for_backward(*_trace(config))
    items = {**plan.ipus[0].items, "stash": 0, "logits": 0, "live": kept.forward + sum(kept.gradients.values())}
    return replace(plan.ipus[0], items=items)


def _trace(config: Config) -> Tuple[Trace, Any]:
    """(trace of the training step for one micro-batch, options)."""
    poptorch = load_poptorch("ipu-emulated")
    python_only = {"engine": "auto", "ffn_chunk": 0, "attention_heads_at_once": 0, "keep_last": 0, "segments": None}
    memory = config.memory.model_copy(update=python_only)
    ipu = config.ipu.model_copy(update={"offline_target": None})
    batch = config.batch.model_copy(update={"accumulation": 1, "replicas": 1, "device_iterations": 1})
    small = config.model_copy(update={"memory": memory, "ipu": ipu, "batch": batch})
    model = to_precision(build_meta(small, expected_vocab(small)), small)
    options = make_options(small, poptorch).train
    step = make_step(model, small, poptorch)
    placement = place(model, small, poptorch)
    report = examine(step, _inputs(small), options=options)
    placement.remove()
    return _accepted(report), options


def _accepted(report: Report) -> Trace:
    refused = [violation for violation in report.violations if violation.rule != "pipeline"]  # one micro-batch is enough here
    if report.trace is None or refused:
        text = str(refused[0]).rstrip(".") if refused else "it has no graph"
        raise RunError(f"the training step cannot be traced: {text}. `ipu-lean check` says more.")
    return report.trace


def _inputs(config: Config) -> Tuple[Any, ...]:
    import torch

    return tuple(torch.from_numpy(array).to("meta") for array in blank_batch(config, config.batch.micro))


def _ipu(row: IpuMemory, plan: Plan, found: List[StageKept]) -> IpuMemory:
    """Depths and what is held for each parameter are the plan's; the trace knows types, kept tensors and working sets."""
    workload = plan.workload
    depths = _depths(plan, found)
    here = [stage for stage in found if stage.ipu == row.ipu]
    parameters = sum(stage.parameters for stage in here)
    count = parameters // workload.element
    items = dict(row.items)
    items["weights"] = parameters
    items["accumulators"] = count * workload.accumulator
    items["state"] = row.items["state"] * count // max(1, row.parameters)
    items["stash"] = sum(stage.kept * depths[stage.stage] for stage in here)
    items["live"] = max((stage.live for stage in here), default=0)
    items["logits"] = sum(stage.loss for stage in here)
    items["streams"] = sum(stage.inputs * depths[stage.stage] for stage in here)
    return replace(row, items=items)


def _depths(plan: Plan, found: List[StageKept]) -> Dict[int, int]:
    """Micro-batches that each traced stage keeps: the plan's for the stage at the same place from the end."""
    last = len(plan.stages)
    return {stage.stage: plan.stages[last - len(found) + place].stage.depth for place, stage in enumerate(found)}
