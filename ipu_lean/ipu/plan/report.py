"""A plan as text and as JSON."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

from ipu_lean.ipu.plan.levers import Pulled, levers_until_it_fits
from ipu_lean.ipu.plan.machine import FITS, MEMORY, TIGHT
from ipu_lean.ipu.plan.memory import ITEMS, IpuMemory
from ipu_lean.ipu.plan.plan import Plan

_MIB = 2**20
_TITLES = {"accumulators": "grads", "temporaries": "temp"}


def format_plan(plan: Plan, notes: Sequence[str] = (), last: str = "verdict") -> str:
    """The report: stages, IPUs, pipeline, batch, levers, and in the last line the verdict, which `last` introduces."""
    lines = [f"note: {note}" for note in notes] + ([""] if notes else [])
    lines += _stage_table(plan) + [""] + _ipu_table(plan) + [""]
    lines += [f"sums and percent of {MEMORY / _MIB:.0f} MiB an IPU; temp: what matrix products may take", pipeline_line(plan)]
    lines += [batch_line(plan), *_offchip_line(plan), *_lever_lines(plan)]
    lines.append(f"fits: at most {_percent(FITS)} before / after temporaries, as published runs are; tight: {_percent(TIGHT)}")
    lines.append("an estimate without code and exchange: `ipu-lean compile --offline` decides")
    lines.append(f"{last}: {plan.verdict}")
    return "\n".join(lines)


def pipeline_line(plan: Plan) -> str:
    """Stages, accumulation and bubble in a sentence."""
    workload = plan.workload
    count = f"{workload.ipus} IPU{'' if workload.ipus == 1 else 's'} a replica"
    if plan.forward == 1:
        return count if workload.ipus == 1 else f"{count}, one after another"
    if not workload.training:
        return f"{count}, F = {plan.forward} forward stages: inference needs {plan.forward} device iterations"
    short = "" if workload.accumulation >= plan.needed else ", too few: `check` would refuse"
    assumed = "" if not short else f" at {plan.needed}"
    return (
        f"{count}, F = {plan.forward} forward stages: accumulation >= 2F-1 = {plan.needed} "
        f"(it is {workload.accumulation}{short}); bubble {100 * plan.idle:.1f} %{assumed}"
    )


def batch_line(plan: Plan) -> str:
    """The batch arithmetic."""
    w = plan.workload
    total = w.ipus * w.replicas
    return (
        f"global batch: {w.micro} micro x {w.accumulation} accumulation x {w.replicas} replica{'' if w.replicas == 1 else 's'} = "
        f"{w.global_batch:,} rows; {total} IPU{'' if total == 1 else 's'} in all"
    )


def lever_line(step: Pulled, first: bool = True) -> str:
    """What to change, and what it leads to."""
    row = max(step.plan.ipus, key=lambda ipu: ipu.after)
    before, after = (100 * share for share in row.shares)
    start = "first lever" if first else "then"
    return f"{start}: {step.lever} ({step.keys}) -> IPU {row.ipu} {before:.0f} %, {after:.0f} %: {step.plan.verdict}"


def as_json(plan: Plan, notes: Sequence[str] = ()) -> Dict[str, Any]:
    """Plain data: bytes and shares."""
    levers = levers_until_it_fits(plan)
    worst = plan.guilty or plan.fullest
    return {
        "memory": MEMORY,
        "limits": {"fits": list(FITS), "tight": list(TIGHT)},
        "ipus": [_ipu_json(row) for row in plan.ipus],
        "stages": [
            {"stage": row.stage.index, "ipu": row.stage.ipu, "layers": len(row.stage.layers), "stash_depth": row.stage.depth,
             "parameters": row.parameters, "bytes": row.items}
            for row in plan.stages
        ],
        "forward_stages": plan.forward,
        "minimum_accumulation": plan.needed,
        "accumulation": plan.workload.accumulation,
        "bubble": plan.idle,
        "global_batch": plan.workload.global_batch,
        "replicas": plan.workload.replicas,
        "ipus_in_all": plan.workload.ipus * plan.workload.replicas,
        "parameters": plan.workload.network.parameters,
        "worst": {"ipu": worst.ipu, "before": worst.shares[0], "after": worst.shares[1]},
        "first_lever": None if not levers else {"name": levers[0].lever, "change": levers[0].keys},
        "levers": [{"name": step.lever, "change": step.keys, "verdict": step.plan.verdict} for step in levers],
        "notes": list(notes),
    }


def _ipu_json(row: IpuMemory) -> Dict[str, Any]:
    shares = {"before": row.shares[0], "after": row.shares[1]}
    return {"ipu": row.ipu, "layers": row.layers, "parameters": row.parameters, "bytes": row.items, "offchip": row.offchip,
            **shares, "verdict": row.verdict}


def _stage_table(plan: Plan) -> List[str]:
    names = [name for name in ITEMS if name != "temporaries"]
    lines = [f"{'stage':>5} {'IPU':>4} {'layers':>7} {'keeps':>6}" + "".join(f"{_TITLES.get(name, name):>9}" for name in names)]
    for row in plan.stages:
        numbers = "".join(f"{row.items[name] / _MIB:>9.1f}" for name in names)
        lines.append(f"{row.stage.index:>5} {row.stage.ipu:>4} {len(row.stage.layers):>7} {row.stage.depth:>6}{numbers}")
    return lines


def _ipu_table(plan: Plan) -> List[str]:
    head = f"{'IPU':>5} {'layers':>7} {'parameters':>12} {'sum MiB':>9} {'%':>6} {'temp':>8} {'total MiB':>10} {'%':>6}  verdict"
    lines = [head]
    for row in plan.ipus:
        before, after = (100 * share for share in row.shares)
        lines.append(
            f"{row.ipu:>5} {row.layers:>7} {row.parameters:>12,} {row.before / _MIB:>9.1f} {before:>6.1f} "
            f"{row.items['temporaries'] / _MIB:>8.1f} {row.after / _MIB:>10.1f} {after:>6.1f}  {row.verdict}"
        )
    return lines


def _offchip_line(plan: Plan) -> List[str]:
    total = sum(row.offchip for row in plan.ipus)
    return [f"optimizer state in streaming memory: {total / _MIB:,.0f} MiB a replica"] if total else []


def _lever_lines(plan: Plan) -> List[str]:
    if plan.guilty is None:
        return []
    steps = levers_until_it_fits(plan)
    if not steps:
        return [f"IPU {plan.guilty.ipu} does not fit, and no lever helps: a smaller model"]
    lines = [lever_line(step, place == 0) for place, step in enumerate(steps)]
    if steps[-1].plan.guilty is not None:
        lines.append("that is every lever, and still not enough")
    return lines


def _percent(limit: Sequence[float]) -> str:
    return " / ".join(f"{100 * share:.0f} %" for share in limit)
