"""`study`: from a configuration with variants to a ranking, curves, and what each variant costs."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

from ipu_lean.config import Config, Loaded, config_hash, dump_config, load_config, require_device
from ipu_lean.data import expected_vocab
from ipu_lean.errors import ConfigError, Interrupted, RunError, VerdictFailed
from ipu_lean.models import build_meta
from ipu_lean.mup.verdict import FAIL, INCONCLUSIVE, PASS, overall
from ipu_lean.sweep.commands import check_data
from ipu_lean.sweep.directory import check_same_base, task_of_all
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
    config = with_absolute_paths(loaded.config)
    variants = variants_of(config)
    check_variants(variants)
    if is_study(out):
        run = StudyDirectory(Path(str(out)))
        if (run.read_summary() or {}).get("command") == "sweep":
            raise ConfigError(f"{out} holds a sweep", key="--out", suggestion=f"go on with it: `ipu-lean sweep {out}`")
        free, may = ("name", "sweep", "study"), "only variants, seeds and workers may change"
        can = partial(check_change, "any")
        check_same_base(load_config(run.config), config, "study", free, may, "make it a variant", can)
        run.lock()  # before anything changes under another process's hands
        write_atomic(run.config, dump_config(config))
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


def _study(
    run: StudyDirectory, config: Config, variants: Dict[str, List[Trial]], retry: bool, strict: bool, say: Say
) -> Summary:
    started = time.perf_counter()
    assert config.study is not None
    trials = [trial for seeds in zip(*variants.values()) for trial in seeds]  # a seed of every variant, then the next
    run.lock()
    try:
        done = run.store.done_ids(retry)
        todo = {trial.id: trial for trial in trials if trial.id not in done}
        say(f"study directory: {run.path}")
        say(
            f"{len(variants)} variants x {len(config.study.seeds)} seeds of {config.train.steps} updates, "
            f"{len({trial.id for trial in trials} & done)} finished before; {config.study.workers} workers"
        )
        with StopSignal(f"stopped; finished variants are kept. Go on with: ipu-lean study {run.path}"):
            run.task(config)

            def on_result(result: TrialResult) -> None:
                kept = result if isinstance(result, VariantResult) else VariantResult.of(result)
                run.store.add(kept)
                if config.logging.progress != "none":
                    ranking = report.rank(variants, run.store, config.study.reference)
                    say(f"\n{report.describe(kept)}\n{report.table(ranking)}")

            run_local([Job([trial], False) for trial in todo.values()], config.study.workers, on_result, train=train_job)
        return _finish(run, config, variants, strict, time.perf_counter() - started)
    except (Interrupted, KeyboardInterrupt) as problem:
        seconds = time.perf_counter() - started
        run.write_summary(_summary(config, seconds, status="interrupted", exit_code=130, error=str(problem)))
        raise
    finally:
        run.unlock()


def _summary(config: Config, seconds: float, **fields: Any) -> Summary:
    return make_summary("study", device=config.device, config_hash=config_hash(config), seconds=seconds, **fields)


def _finish(run: StudyDirectory, config: Config, variants: Dict[str, List[Trial]], strict: bool, seconds: float) -> Summary:
    """CSV, curves, ranking, verdict, summary."""
    assert config.study is not None
    rows = report.rank(variants, run.store, config.study.reference)
    verdicts = judge(config.study, {row.name: row.beside for row in rows})
    verdict = overall(verdicts) if verdicts else None
    told = [] if verdict is None else ["", *report.verdict_lines(verdicts), f"verdict: {verdict}"]
    seeds, note = len(config.study.seeds), report.seeds_note(len(config.study.seeds))
    text = "\n".join([report.table(rows), *([] if note is None else ["", note]), *told])
    report.write_csv(run.results, variants, run.store)
    run.table.write_text(text + "\n", encoding="utf-8")
    report.plot(run.curves, variants, run.store, f"{config.name}: {config.train.steps} updates, {seeds} seed{'s' * (seeds > 1)}")
    results = [result for row in rows for result in row.results]
    short = [f"{one.name}: {one.text}" for one in verdicts if one.status != PASS]
    summary = _summary(
        config,
        seconds,
        steps=sum(len(result.losses) for result in results),
        metrics={
            "ranking": [row.as_dict() for row in rows],
            "note": note,
            "verdicts": [one.as_dict() for one in verdicts],
            "diagnosis": "; ".join(short),
        },
        artifacts={"run": str(run.path), "results": str(run.results), "table": str(run.table), "curves": str(run.curves)},
    )
    summary["verdict"] = verdict
    if not any(result.status == DONE for result in results):
        reasons = sorted({result.error or result.status for result in results})
        error = f"no variant came to its end, so there is nothing to rank: {'; '.join(reasons[:3])}"
        run.write_summary({**summary, "status": "failed", "exit_code": 1, "error": error})
        raise RunError(error)
    if verdict == FAIL or (verdict == INCONCLUSIVE and strict):
        failed = [f"{one.name}: {one.text}" for one in verdicts if one.status == (FAIL if verdict == FAIL else INCONCLUSIVE)]
        error = f"not what was expected of the variants ({verdict}): {'; '.join(failed)}"
        summary = {**summary, "status": "failed", "exit_code": VerdictFailed.exit_code, "error": error}
        run.write_summary(summary)
        raise VerdictFailed(error, {**summary, "table": text})
    run.write_summary(summary)
    return {**summary, "table": text}
