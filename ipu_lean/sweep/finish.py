"""The end of a sweep: its trials judged, and what the directory keeps of that beside them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any, Callable, Dict, Sequence

from ipu_lean.config import Config, config_hash
from ipu_lean.errors import RunError, VerdictFailed
from ipu_lean.mup.verdict import FAIL, INCONCLUSIVE
from ipu_lean.sweep import judge, report
from ipu_lean.sweep.directory import SweepDirectory, refusal_text, try_to_write
from ipu_lean.sweep.grid import Trial
from ipu_lean.sweep.results import DONE, TrialResult
from ipu_lean.train.files import write_atomic
from ipu_lean.train.runs import make_summary

Summary = Dict[str, Any]
Say = Callable[[str], None]


def make_sweep_summary(config: Config, seconds: float, **fields: Any) -> Summary:
    """`make_summary` of a sweep."""
    return make_summary("sweep", device=config.device, config_hash=config_hash(config), seconds=seconds, **fields)


def make_partial_summary(run: SweepDirectory, config: Config, trials: Sequence[Trial], seconds: float) -> Summary:
    """Of a share, or of a plan: no verdict, and nothing that another share could overwrite."""
    results = {result.id: result for result in run.store.results([trial.id for trial in trials])}
    counted = judge.counts(trials, results)
    summary = make_sweep_summary(config, seconds, metrics={"counts": counted}, artifacts={"run": str(run.path)})
    shown = ", ".join(f"{count} {name}" for name, count in counted.items() if count)
    return {**summary, "table": f"{shown}\nrun what is missing and judge all: ipu-lean sweep {shlex.quote(str(run.path))}"}


def judge_all(run: SweepDirectory, config: Config, trials: Sequence[Trial], seconds: float, strict: bool, say: Say) -> Summary:
    """Table, CSV, plots, summary; a directory that cannot be written is told to `say`, and costs nothing of what is returned.

    Raises:
        RunError: no trial came to its end. VerdictFailed: what the verdict calls for, with the summary.
    """
    results = {result.id: result for result in run.store.results([trial.id for trial in trials])}
    counted = judge.counts(trials, results)
    if not counted[DONE]:
        reasons = sorted({result.error or result.status for result in results.values()})
        error = RunError(f"none of {len(trials)} trials came to its end, so there is nothing to judge: {'; '.join(reasons[:3])}")
        summary = make_sweep_summary(
            config, seconds, status="failed", exit_code=1, error=str(error), metrics={"counts": counted}
        )
        _kept(run, say, lambda: report.write_csv(run.csv, trials, results), lambda: run.write_summary(summary))
        raise error
    groups = judge.group_trials(trials, results)
    table = report.format_table(groups, counted, len({trial.axes["seed"] for trial in trials}))
    _kept(run, say, lambda: _keep_tables(run, config, trials, results, groups, table))
    verdict = judge.sweep_verdict(groups)
    failed = verdict == FAIL or (strict and verdict == INCONCLUSIVE)
    summary = make_sweep_summary(
        config,
        seconds,
        exit_code=VerdictFailed.exit_code if failed else 0,
        steps=sum(len(result.losses) for result in results.values()),
        metrics={"counts": counted, "groups": [group.as_dict() for group in groups]},
        artifacts=report.as_artifacts(_artifacts(run)),
    )
    summary["verdict"] = verdict
    try_to_write(False, f"{run.summary} was not replaced", lambda: run.write_summary(summary))
    reason = judge.worst(groups, verdict) if verdict is not None else None
    shown = {**summary, "table": table, "reason": None if reason is None else reason.text}
    if failed and reason is not None:
        raise VerdictFailed(reason.text, shown)
    return shown


def _artifacts(run: SweepDirectory) -> Dict[str, Path]:
    return {"run": run.path, "results": run.csv, "table": run.table, "plot": run.plot, "steps": run.steps}


def _kept(run: SweepDirectory, say: Say, *writes: Callable[[], Any]) -> None:
    refusal = try_to_write(False, f"nothing was kept in {run.path}", *writes)
    if refusal is not None:
        say(refusal_text(run, refusal))


def _keep_tables(
    run: SweepDirectory,
    config: Config,
    trials: Sequence[Trial],
    results: Dict[str, TrialResult],
    groups: Sequence[judge.Group],
    table: str,
) -> None:
    """Everything for people."""
    report.write_csv(run.csv, trials, results)
    write_atomic(run.table, table + "\n")
    title = f"{config.name}: {len(trials)} trials of {config.train.steps} updates"
    report.plot_transfer(groups, run.plot, title)
    report.plot_steps(groups, trials, results, run.steps, title)
