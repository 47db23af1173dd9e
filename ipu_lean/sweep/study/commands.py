"""`study`: from a configuration with variants to a ranking, curves, and what each variant costs."""

from __future__ import annotations

import shlex
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

from ipu_lean.config import Config, Loaded, config_hash, dump_config, load_config, require_device
from ipu_lean.data import expected_vocab
from ipu_lean.errors import ConfigError, Interrupted, IpuLeanError, RunError, VerdictFailed
from ipu_lean.models import build_meta
from ipu_lean.mup.verdict import FAIL, INCONCLUSIVE, PASS, Verdict, overall
from ipu_lean.sweep.commands import check_data
from ipu_lean.sweep.directory import check_same_base, refusal_text, task_of_all, try_to_write
from ipu_lean.sweep.grid import Trial
from ipu_lean.sweep.jobs import Job
from ipu_lean.sweep.results import DONE, TrialResult
from ipu_lean.sweep.study import report
from ipu_lean.sweep.study.judge import judge
from ipu_lean.sweep.study.result import VariantResult, VariantStore
from ipu_lean.sweep.study.trial import train_job
from ipu_lean.sweep.study.variants import check_change, variants_of
from ipu_lean.sweep.workers import run_local
from ipu_lean.train.commands import with_absolute_paths
from ipu_lean.train.files import write_atomic
from ipu_lean.train.precision import check_precision
from ipu_lean.train.runs import RunDirectory, make_summary
from ipu_lean.train.signals import StopSignal
from ipu_lean.train.tasks import Task

Summary = Dict[str, Any]
Say = Callable[[str], None]


class StudyDirectory(RunDirectory):
    """config.yaml, trials/, and what is made of them."""

    doing = "running the study in"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.store = VariantStore(self.path)
        self.results = self.path / "results.csv"
        self.table = self.path / "table.txt"
        self.curves = self.path / "curves.png"

    def task(self, config: Config) -> Task:
        """The data of all variants; RunError if the text has changed since the study began."""
        return task_of_all(self, config, "study", "variants")


def is_study(path: Optional[str]) -> bool:
    """Whether `path` is the directory of a study that has begun."""
    run = None if not path else StudyDirectory(Path(path))
    return run is not None and run.config.is_file() and run.store.directory.is_dir()


def run_study(
    loaded: Loaded,
    out: Optional[str] = None,
    *,
    retry: bool = False,
    strict: bool = False,
    say: Say = lambda text: None,
) -> Summary:
    """Train every variant of `loaded.config.study` with every seed, rank them, and judge what was expected of them.

    Args:
        out: the directory; `runs/NAME-study-TIME` unless given. A study that has begun there goes on: what has a result is not
            trained again, and variants and seeds may have been added.
        retry: train again what failed (diverged is a result). strict: an inconclusive verdict fails as well.
    Raises:
        ConfigError, EnvironmentProblem: before anything was written.
        RunError: no variant came to its end.
        VerdictFailed: not what `study.expect` says; everything is in the directory all the same.
        Interrupted: Ctrl-C or SIGTERM; the text is the command that goes on.
    """
    if is_study(out) and StudyDirectory(Path(str(out))).made_by() == "sweep":
        raise ConfigError(f"{out} holds a sweep", key="--out", suggestion=f"go on with it: `ipu-lean sweep {out}`")
    config = with_absolute_paths(loaded.config).model_copy(update={"sweep": None})  # by which `made_by` tells the two
    variants = variants_of(config)
    if not is_study(out) or _left(StudyDirectory(Path(str(out))), variants, retry):
        check_variants(variants)
    if is_study(out):
        run = StudyDirectory(Path(str(out)))
        free, may = ("name", "sweep", "study"), "only variants, seeds and workers may change"
        can = partial(check_change, "any")
        check_same_base(load_config(run.config), config, "study", free, may, "make it a variant", can)
        # The lock comes first: before anything changes under another process's hands.
        what = f"the study in {run.path} does not go on"
        try_to_write(bool(_left(run, variants, retry)), what, run.lock, lambda: write_atomic(run.config, dump_config(config)))
    else:
        RunDirectory.check_free(out)
        check_data(config)
        run = StudyDirectory(RunDirectory.create(out, f"{config.name}-study", dump_config(config)).path)
        run.store.directory.mkdir()
    return _study(run, config, variants, retry, strict, say)


def resume_study(directory: str, loaded: Loaded, **options: Any) -> Summary:
    """Go on with the study in `directory`; `loaded` is its configuration with overrides. Options as `run_study`'s."""
    return run_study(loaded, directory, **options)


def check_variants(variants: Dict[str, List[Trial]]) -> None:
    """Everything that can be wrong about a variant before its data is read."""
    for trials in variants.values():
        config = trials[0].config
        require_device(config)
        check_precision(config)
        build_meta(config, expected_vocab(config))


def _in_order(variants: Dict[str, List[Trial]]) -> List[Trial]:
    """A seed of every variant, then the next."""
    return [trial for seeds in zip(*variants.values()) for trial in seeds]


def _left(run: StudyDirectory, variants: Dict[str, List[Trial]], retry: bool) -> Dict[str, Trial]:
    """Those that must be trained, by their ids: two variants may be the same."""
    done = run.store.done_ids(retry)
    return {trial.id: trial for trial in _in_order(variants) if trial.id not in done}


def _study(
    run: StudyDirectory, config: Config, variants: Dict[str, List[Trial]], retry: bool, strict: bool, say: Say
) -> Summary:
    started = time.perf_counter()
    assert config.study is not None
    left = bool(_left(run, variants, retry))
    what = f"what is left to train in {run.path} could not be kept"
    try_to_write(left, what, run.lock, run.store.check_writable)
    try:
        todo = _left(run, variants, retry)
        finished = len({trial.id for trial in _in_order(variants)}) - len(todo)
        say(f"study directory: {run.path}")
        say(
            f"{len(variants)} variants x {len(config.study.seeds)} seeds of {config.train.steps} updates, "
            f"{finished} finished before; {config.study.workers} workers"
        )
        with StopSignal(f"stopped; finished variants are kept. Go on with: ipu-lean study {shlex.quote(str(run.path))}"):
            if todo:
                run.task(config)

            def on_result(result: TrialResult) -> None:
                kept = result if isinstance(result, VariantResult) else VariantResult.of(result)
                run.store.add(kept)
                if config.logging.progress != "none":
                    ranking = report.rank(variants, run.store, config.study.reference)
                    say(f"\n{report.describe(kept)}\n{report.table(ranking)}")

            run_local([Job([trial], False) for trial in todo.values()], config.study.workers, on_result, train=train_job)
        return _finish(run, config, variants, strict, time.perf_counter() - started, say)
    except (Interrupted, KeyboardInterrupt) as problem:
        seconds = time.perf_counter() - started
        run.write_summary(_summary(config, seconds, status="interrupted", exit_code=130, error=str(problem)))
        raise
    finally:
        run.unlock()


def _summary(config: Config, seconds: float, **fields: Any) -> Summary:
    return make_summary("study", device=config.device, config_hash=config_hash(config), seconds=seconds, **fields)


def _finish(
    run: StudyDirectory, config: Config, variants: Dict[str, List[Trial]], strict: bool, seconds: float, say: Say
) -> Summary:
    """CSV, curves, ranking, verdict, summary; a directory that cannot be written is told, and shown all the same."""
    assert config.study is not None
    rows = report.rank(variants, run.store, config.study.reference)
    verdicts = judge(config.study, {row.name: row.beside for row in rows})
    verdict = overall(verdicts) if verdicts else None
    told = [] if verdict is None else ["", *report.verdict_lines(verdicts), f"verdict: {verdict}"]
    seeds, note = len(config.study.seeds), report.seeds_note(len(config.study.seeds))
    text = "\n".join([report.table(rows), *([] if note is None else ["", note]), *told])
    results = [result for row in rows for result in row.results]
    summary = _summary(
        config,
        seconds,
        steps=sum(len(result.losses) for result in results),
        metrics={
            "ranking": [row.as_dict() for row in rows],
            "note": note,
            "verdicts": [one.as_dict() for one in verdicts],
            "diagnosis": "; ".join(f"{one.name}: {one.text}" for one in verdicts if one.status != PASS),
        },
        artifacts={"run": str(run.path), "results": str(run.results), "table": str(run.table), "curves": str(run.curves)},
    )
    error = _problem(results, verdicts, verdict, strict)
    summary["verdict"] = verdict
    if error is not None:
        summary.update(status="failed", exit_code=error.exit_code, error=str(error))
    title = f"{config.name}: {config.train.steps} updates, {seeds} seed{'s' * (seeds > 1)}"
    refusal = try_to_write(
        False,
        f"nothing was kept in {run.path}",
        lambda: report.write_csv(run.results, variants, run.store),
        lambda: write_atomic(run.table, text + "\n"),
        lambda: report.plot(run.curves, variants, run.store, title),
        lambda: run.write_summary(summary),
    )
    if refusal is not None:
        say(refusal_text(run, refusal))
    if isinstance(error, VerdictFailed):
        error.summary = {**summary, "table": text}
    if error is not None:
        raise error
    return {**summary, "table": text}


def _problem(
    results: Sequence[TrialResult], verdicts: Sequence[Verdict], verdict: Optional[str], strict: bool
) -> Optional[IpuLeanError]:
    """What the study ends with, if it does not end well."""
    if not any(result.status == DONE for result in results):
        reasons = sorted({result.error or result.status for result in results})
        return RunError(f"no variant came to its end, so there is nothing to rank: {'; '.join(reasons[:3])}")
    if verdict == FAIL or (verdict == INCONCLUSIVE and strict):
        failed = [f"{one.name}: {one.text}" for one in verdicts if one.status == verdict]
        return VerdictFailed(f"not what was expected of the variants ({verdict}): {'; '.join(failed)}")
    return None
