"""`plan`: will this configuration fit into the memory of its IPUs, and what is to be changed if not?"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, Optional

from ipu_lean.config import Loaded, config_hash, dump_config
from ipu_lean.errors import ConfigError, VerdictFailed
from ipu_lean.ipu.plan.auto import explain, keys_of, search
from ipu_lean.ipu.plan.levers import first_lever
from ipu_lean.ipu.plan.machine import PODS, worse
from ipu_lean.ipu.plan.network import as_ipu, workload_of
from ipu_lean.ipu.plan.plan import Plan, make_plan
from ipu_lean.ipu.plan.plot import plot_plan
from ipu_lean.ipu.plan.report import as_json, format_plan

SCHEMA = 1


def run_plan(
    loaded: Loaded, pod: Optional[int] = None, out: Optional[str] = None, traced: bool = False
) -> Dict[str, Any]:
    """The summary of `plan`.

    Args:
        pod: IPUs of the machine; None for batch.replicas. out: a new directory for config.yaml, plan.txt, plan.png, summary.json.
        traced: also trace the step (seconds, and torch); the less favourable of both verdicts then counts.
    Raises:
        VerdictFailed: an IPU would overflow; `summary` holds the rest.
    """
    directory = None if out is None else _new_directory(out)
    config, notes = as_ipu(loaded.config)
    plan = make_plan(workload_of(config, pod))
    if pod is not None and plan.workload.replicas != config.batch.replicas:
        notes.append(f"a POD{pod} has room for {plan.workload.replicas} replicas (batch.replicas is {config.batch.replicas})")
    table, metrics, deciding = format_plan(plan, notes), as_json(plan, notes), plan
    if traced:
        from ipu_lean.ipu.traced import compare, format_comparison, traced_plan

        seen = traced_plan(plan, config)
        metrics["traced"] = {"ipus": compare(plan, seen), "verdict": seen.verdict}
        table = f"{table}\n\n{format_comparison(plan, seen)}"
        deciding = seen if worse(plan.verdict, seen.verdict) != plan.verdict else plan
    failed = deciding.verdict == "no"
    summary = {
        "schema": SCHEMA,
        "command": "plan",
        "status": "ok",
        "verdict": deciding.verdict,
        "exit_code": VerdictFailed.exit_code if failed else 0,
        "device": loaded.config.device,
        "config_hash": config_hash(loaded.config),
        "metrics": metrics,
        "artifacts": {},
        "table": table,
    }
    if directory is not None:
        _write(directory, plan, summary, dump_config(loaded.config))
    if failed:
        raise VerdictFailed(_refusal(deciding), summary)
    return summary


def run_auto(
    loaded: Loaded, pod: Optional[int] = None, out: Optional[str] = None, traced: bool = False
) -> Dict[str, Any]:
    """The summary of `plan --auto`: that of the best plan's configuration, which `out` keeps as config.yaml.

    Raises:
        VerdictFailed: no plan of this model is even tight on the POD.
    """
    config, _ = as_ipu(loaded.config)
    start = workload_of(config)
    wanted = pod or next((size for size in PODS if size >= start.ipus * start.replicas), PODS[-1])
    if wanted not in PODS:
        raise ConfigError(f"a POD has {', '.join(map(str, PODS[:-1]))} or {PODS[-1]} IPUs", key="--pod", value=wanted)
    found = search(loaded.config, wanted)
    if found is None:
        short = "" if config.ipu.eval_device_iterations is None else ", or leave ipu.eval_device_iterations out"
        ways = f"Try another --pod, or more rows (batch.accumulation){short}."
        rule = f"no plan with a global batch of {start.global_batch} rows fits a POD{wanted}, of which a plan uses every IPU"
        raise _nothing(loaded, f"{rule}. {ways}")
    summary = run_plan(loaded._replace(config=found.config), None, out, traced)
    keys, why = keys_of(config, found.plan.workload), explain(found)
    counts = {"tried": found.tried, "fitting": found.fitting}
    summary["metrics"]["auto"] = {"pod": wanted, "samples_per_second": found.speed, **counts, "keys": keys, "why": why}
    changed = [f"{key}: {json.dumps(value)}" for key, value in keys.items()]
    summary["table"] = "\n".join([summary["table"], "", *why, "", *changed])
    return summary


def _nothing(loaded: Loaded, text: str) -> VerdictFailed:
    """No plan was found; the summary is that of the configuration as it is, which says what stands in the way."""
    try:
        summary = run_plan(loaded)
    except VerdictFailed as failure:
        assert failure.summary is not None
        summary = failure.summary
    return VerdictFailed(text, {**summary, "verdict": "no", "exit_code": VerdictFailed.exit_code})


def _refusal(plan: Plan) -> str:
    assert plan.guilty is not None
    before, after = (100 * share for share in plan.guilty.shares)
    text = f"IPU {plan.guilty.ipu} would be {before:.0f} % full, {after:.0f} % with the temporaries of matrix products."
    lever = first_lever(make_plan(plan.workload))
    return text if lever is None else f"{text} First lever: {lever.lever} ({lever.keys})."


def _new_directory(out: str) -> Path:
    """`out`, made. ConfigError if it is a file or holds something."""
    if os.path.isfile(out):
        raise ConfigError(f"{out} is a file, and the output needs a directory", key="--out", suggestion="choose another name")
    if os.path.isdir(out) and os.listdir(out):
        raise ConfigError(f"the output directory {out} exists and is not empty", key="--out", suggestion="choose another")
    try:
        os.makedirs(out, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"the output directory {out} cannot be made: {error.strerror}", key="--out") from error
    return Path(out).absolute()


def _write(directory: Path, plan: Plan, summary: Dict[str, Any], config_text: str) -> None:
    """The summary last: where it is, everything is."""
    artifacts = summary["artifacts"]
    texts = {"config": ("config.yaml", config_text), "table": ("plan.txt", summary["table"] + "\n")}
    for name, (file, text) in texts.items():
        (directory / file).write_text(text, encoding="utf-8")
        artifacts[name] = str(directory / file)
    artifacts["plot"] = str(plot_plan(plan, directory / "plan.png"))
    plain = {key: value for key, value in summary.items() if key != "table"}
    (directory / "summary.json").write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
