"""`plan`: will this configuration fit into the memory of its IPUs, and what is to be changed if not?"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from ipu_lean.config import Loaded, config_hash, dump_config
from ipu_lean.config.ipu_rules import check_placement
from ipu_lean.errors import ConfigError, VerdictFailed
from ipu_lean.ipu.plan.auto import explain, keys_of, search
from ipu_lean.ipu.plan.levers import first_lever
from ipu_lean.ipu.plan.machine import PODS, worse
from ipu_lean.ipu.plan.network import as_ipu, workload_of
from ipu_lean.ipu.plan.plan import Plan, make_plan
from ipu_lean.ipu.plan.plot import plot_plan
from ipu_lean.ipu.plan.report import as_json, format_plan

SCHEMA = 1
Summary = Dict[str, Any]


def run_plan(loaded: Loaded, pod: Optional[int] = None, out: Optional[str] = None, traced: bool = False) -> Summary:
    """The summary of `plan`.

    Args:
        pod: IPUs of the machine; None for batch.replicas. out: a new directory for config.yaml, plan.txt, plan.png, summary.json.
        traced: also trace the step (seconds, and torch); the less favourable of both verdicts then counts.
    Raises:
        ConfigError: a layer, the embedding or the readout cannot stand where `ipu` puts it.
        VerdictFailed: an IPU would overflow; `summary` holds the rest.
    """
    check_placement(loaded.config)
    directory = None if out is None else _free_place(out)
    plan, deciding, summary = _planned(loaded, pod, traced)
    if directory is not None:
        _write(directory, plan, summary, dump_config(loaded.config))
    return _unless_it_overflows(deciding, summary)


def _planned(
    loaded: Loaded, pod: Optional[int] = None, traced: bool = False, last: str = "verdict"
) -> Tuple[Plan, Plan, Summary]:
    """(the plan, that of plan and traced step whose verdict counts, the summary with the table); `last`: see `format_plan`."""
    config, notes = as_ipu(loaded.config)
    plan = make_plan(workload_of(config, pod))
    if pod is not None and plan.workload.replicas != config.batch.replicas:
        notes.append(f"a POD{pod} has room for {plan.workload.replicas} replicas (batch.replicas is {config.batch.replicas})")
    table, metrics, deciding = format_plan(plan, notes, last), as_json(plan, notes), plan
    if traced:
        from ipu_lean.ipu.traced import compare, format_comparison, traced_plan

        seen = traced_plan(plan, config)
        metrics["traced"] = {"ipus": compare(plan, seen), "verdict": seen.verdict}
        table = f"{table}\n\n{format_comparison(plan, seen)}"
        deciding = seen if worse(plan.verdict, seen.verdict) != plan.verdict else plan
    summary = {
        "schema": SCHEMA,
        "command": "plan",
        "status": "ok",
        "verdict": deciding.verdict,
        "exit_code": VerdictFailed.exit_code if deciding.verdict == "no" else 0,
        "device": loaded.config.device,
        "config_hash": config_hash(loaded.config),
        "metrics": metrics,
        "artifacts": {},
        "table": table,
    }
    return plan, deciding, summary


def _unless_it_overflows(deciding: Plan, summary: Summary) -> Summary:
    if deciding.verdict == "no":
        raise VerdictFailed(_refusal(deciding), summary)
    return summary


def run_auto(loaded: Loaded, pod: Optional[int] = None, out: Optional[str] = None, traced: bool = False) -> Summary:
    """The summary of `plan --auto`: that of the best plan's configuration, which `out` keeps as config.yaml.

    Raises:
        VerdictFailed: no plan of this model is even tight on the POD.
    """
    config, _ = as_ipu(loaded.config)
    start = workload_of(config)
    wanted = next((size for size in PODS if size >= start.ipus * start.replicas), PODS[-1]) if pod is None else pod
    if wanted not in PODS:
        raise ConfigError(f"a POD has {', '.join(map(str, PODS[:-1]))} or {PODS[-1]} IPUs", key="--pod", value=wanted)
    found = search(loaded.config, wanted)
    if found is None:
        short = "" if config.ipu.eval_device_iterations is None else ", or leave ipu.eval_device_iterations out"
        ways = f"Try another --pod, or more rows (batch.accumulation){short}."
        rule = f"no plan with a global batch of {start.global_batch} rows fits a POD{wanted}, of which a plan uses every IPU"
        raise _nothing(loaded, wanted, f"{rule}. {ways}")
    directory = None if out is None else _free_place(out)
    plan, deciding, summary = _planned(loaded._replace(config=found.config), traced=traced)
    keys, why = keys_of(config, found.plan.workload), explain(found)
    counts = {"tried": found.tried, "fitting": found.fitting}
    summary["metrics"]["auto"] = {
        "pod": wanted, "found": True, "samples_per_second": found.speed, **counts, "keys": keys, "why": why,
    }  # fmt: skip
    changed = [f"{key}: {json.dumps(value)}" for key, value in keys.items()]
    summary["table"] = "\n".join([
        f"--auto found this plan for a POD{wanted}:", "", *why, "",
        "its keys, in place of the file's:", "", *changed, "",
        "what it comes to (without --auto: what the file as it stands comes to):", "", summary["table"],
    ])  # fmt: skip
    if directory is not None:
        _write(directory, plan, summary, dump_config(found.config))
    return _unless_it_overflows(deciding, summary)


def _nothing(loaded: Loaded, pod: int, text: str) -> VerdictFailed:
    """No plan was found. What the configuration comes to as it stands says what is in the way, and is kept well apart."""
    _, _, own = _planned(loaded, last="verdict on the file as it stands, not on --auto")
    table = [
        f"--auto found no plan for a POD{pod}.", "",
        f"The file as it stands ({own['metrics']['ipus_in_all']} IPUs, which --auto did not choose), for comparison:", "",
        own["table"], "",
        f"verdict on --auto for a POD{pod}: no",
    ]  # fmt: skip
    metrics = {
        "auto": {"pod": pod, "found": False, "why": text},
        "as_it_stands": {**own["metrics"], "verdict": own["verdict"]},
    }
    summary = {**own, "table": "\n".join(table), "metrics": metrics, "verdict": "no", "exit_code": VerdictFailed.exit_code}
    return VerdictFailed(text, summary)


def _refusal(plan: Plan) -> str:
    assert plan.guilty is not None
    before, after = (100 * share for share in plan.guilty.shares)
    text = f"IPU {plan.guilty.ipu} would be {before:.0f} % full, {after:.0f} % with the temporaries of matrix products."
    lever = first_lever(make_plan(plan.workload))
    return text if lever is None else f"{text} First lever: {lever.lever} ({lever.keys})."


def _free_place(out: str) -> Path:
    """`out`, where a new directory can be. ConfigError if it is a file or holds something."""
    if os.path.isfile(out):
        raise ConfigError(f"{out} is a file, and the output needs a directory", key="--out", suggestion="choose another name")
    if os.path.isdir(out) and os.listdir(out):
        raise ConfigError(f"the output directory {out} exists and is not empty", key="--out", suggestion="choose another")
    path = Path(out).absolute()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"the output directory {out} cannot be made: {error.strerror}", key="--out") from error
    return path


def _write(directory: Path, plan: Plan, summary: Dict[str, Any], config_text: str) -> None:
    """All files, or none: they are written aside and then given their names, the summary last: where it is, everything is."""
    there = directory.is_dir()
    aside = (directory if there else directory.parent) / f".{directory.name}.tmp-{os.getpid()}"
    names = {"config": "config.yaml", "table": "plan.txt", "plot": "plan.png"}
    files = [*names.values(), "summary.json"]
    summary["artifacts"].update({name: str(directory / file) for name, file in names.items()})
    plain = {key: value for key, value in summary.items() if key != "table"}
    done = False
    try:
        aside.mkdir()
        (aside / files[0]).write_text(config_text, encoding="utf-8")
        (aside / files[1]).write_text(summary["table"] + "\n", encoding="utf-8")
        plot_plan(plan, aside / files[2])
        (aside / files[3]).write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
        if there:
            for file in files:
                os.replace(aside / file, directory / file)
        else:
            os.replace(aside, directory)
        done = True
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        for file in files if there and not done else ():
            with contextlib.suppress(FileNotFoundError):
                (directory / file).unlink()
