"""The plan in a line or two, for the start of a run and for the moment when an IPU's memory runs out."""

from __future__ import annotations

from typing import List, Optional

from ipu_lean.config import Config
from ipu_lean.ipu.plan.levers import first_lever
from ipu_lean.ipu.plan.network import as_ipu, workload_of
from ipu_lean.ipu.plan.plan import Plan, make_plan
from ipu_lean.ipu.plan.report import pipeline_line


def plan_of(config: Config) -> Plan:
    """The plan from formulas."""
    return make_plan(workload_of(as_ipu(config)[0]))


def plan_lines(config: Config) -> List[str]:
    """Pipeline, and the fullest IPU with its verdict."""
    plan = plan_of(config)
    return [f"plan: {pipeline_line(plan)}", f"plan: {_fullest(plan)}; verdict {plan.verdict} (an estimate, see `ipu-lean plan`)"]


def warning(config: Config) -> Optional[str]:
    """What to say before compiling if the plan does not fit; None if it does."""
    plan = plan_of(config)
    if plan.guilty is None:
        return None
    verb = "is tight" if plan.verdict == "tight" else "would overflow"
    return f"warning: by estimate IPU {plan.guilty.ipu}'s memory {verb}; first lever: {_lever(plan)}"


def out_of_memory(config: Config) -> str:
    """The plan beside a failed compilation, and the lever to pull next."""
    plan = plan_of(config)
    return f"The plan expected: {_fullest(plan)}: {plan.verdict}. Next lever: {_lever(plan)}."


def _fullest(plan: Plan) -> str:
    row = plan.guilty or plan.fullest
    before, after = (100 * share for share in row.shares)
    return f"fullest IPU {row.ipu}, {before:.0f} % of its memory and {after:.0f} % with temporaries"


def _lever(plan: Plan) -> str:
    """The first lever that helps; where everything fits by estimate, the first that relieves the fullest IPU all the same."""
    step = first_lever(plan, always=True)
    return "a smaller model" if step is None else f"{step.lever} ({step.keys})"
