"""`coord-check`: from a configuration to figures, verdicts, a diagnosis and the run directory that holds them."""

from __future__ import annotations

import time
from typing import Any, Callable, Dict, List, Optional, Sequence

import torch

from ipu_lean.config import Config, Loaded, ModelConfig, config_hash, derived, dump_config
from ipu_lean.config.layout import IPU_DEVICES
from ipu_lean.errors import ConfigError, IpuLeanError, VerdictFailed
from ipu_lean.models import build_meta
from ipu_lean.mup.diagnosis import diagnose, diagnose_depth
from ipu_lean.mup.figures import Figures
from ipu_lean.mup.judge import find, growth, judge, judge_depth
from ipu_lean.mup.verdict import FAIL, INCONCLUSIVE, overall
from ipu_lean.parity.record import for_device
from ipu_lean.sweep.coord import plots
from ipu_lean.sweep.coord.capture import Say, measure
from ipu_lean.sweep.coord.report import Outcome, format_table, write_files
from ipu_lean.sweep.coord.rig import Batch, Rig, at_depth, at_width, plain, rig_of, standard, with_rate
from ipu_lean.train.commands import with_absolute_paths
from ipu_lean.train.runs import RunDirectory, make_summary
from ipu_lean.train.tasks import Task, open_task

Summary = Dict[str, Any]
STEPS, SEEDS = 16, 2
LABELS = 1024  # tokens of the fixed batch (or 256 images, 64 texts, 4096 tokens some of which are hidden), unless on an IPU


def run_coord_check(
    loaded: Loaded,
    widths: Optional[Sequence[int]] = None,
    steps: int = STEPS,
    seeds: int = SEEDS,
    lr: Optional[float] = None,
    device: Optional[str] = None,
    depths: Optional[Sequence[int]] = None,
    out: Optional[str] = None,
    *,
    strict: bool = False,
    say: Say = lambda text: None,
) -> Summary:
    """Measure how activations and updates scale with the width (and the depth), and judge it.

    Args:
        widths: two or more (three, to judge activations); 1, 2, 4 and 8 times the base unless given. steps: weight updates.
        seeds: runs at every width. lr: peak learning rate; the configuration's unless given. device: the configuration's unless
        given. depths: also check these, at the narrowest width. out: run directory; `runs/NAME-coord-check-TIME` unless given.
        strict: an inconclusive verdict fails as well.
    Raises:
        ConfigError, EnvironmentProblem: before anything was written.
        VerdictFailed: something does not scale as muP says; everything is in the run directory all the same.
    """
    started = time.perf_counter()
    RunDirectory.check_free(out)
    config = with_absolute_paths(loaded.config)
    config = for_device(plain(with_rate(config, lr) if lr is not None else config), device or config.device)
    chosen = checked_sizes(default_widths(config) if widths is None else widths, "--widths")
    _check_numbers(steps, seeds, lr)
    sized = [at_width(config, width) for width in chosen]
    deep = None if depths is None else _depth_config(config, checked_sizes(depths, "--depths"), chosen[0])
    task = open_task(config)
    for each in sized:
        build_meta(each, task.vocab)  # whatever does not fit the base is told now
    rows = rows_for(config, task)
    batch = batches(task, rows)
    run = RunDirectory.create(out, f"{config.name}-coord-check", dump_config(config))
    try:
        with run.in_one_go():
            outcome = _measured(config, task, batch, chosen, steps, seeds, say)
            outcome.settings["rows"] = rows
            if deep is not None:
                assert depths is not None
                _add_depth(outcome, deep, task, batch, checked_sizes(depths, "--depths"), steps, seeds, say)
    except IpuLeanError as error:
        failed = {"status": "failed", "exit_code": error.exit_code, "error": str(error)}
        run.write_summary(make_summary("coord-check", device=config.device, config_hash=config_hash(config), **failed))
        raise
    return _conclude(config, outcome, run, strict, time.perf_counter() - started)


def batches(task: Task, rows: int) -> Callable[[int], Batch]:
    """seed -> the first batch of `rows` rows in that seed's order, as tensors."""

    def batch(seed: int) -> Batch:
        inputs, labels = task.train_batches(rows, task.config.seed + seed).next()
        return torch.from_numpy(inputs), torch.from_numpy(labels)

    return batch


def rows_for(config: Config, task: Task) -> int:
    """Rows of the fixed batch: an IPU's global batch; elsewhere `LABELS` labels, whatever a training batch is: with few tokens
    the figures scatter, with many they cost time. The global batch if the data is too short for that.
    """
    rows = max(1, LABELS // _cost(config.model))
    if config.device in IPU_DEVICES:
        return config.batch.global_batch
    try:
        task.train_batches(rows)
    except ConfigError:
        return config.batch.global_batch
    return rows


def _cost(model: ModelConfig) -> int:
    """What one row counts as: its labels, with allowance for images (cheap), for texts and for the few labels of a masked LM."""
    if model.kind == "mlp":
        return 4
    if model.head == "classifier":
        return 16
    return model.seq if model.head == "causal-lm" else max(1, model.seq // 4)


def default_widths(config: Config) -> List[int]:
    """1, 2, 4, 8 times the base's width (the model's own without a base)."""
    base = derived.base_model(config)
    return [(config.model.width if base is None else base.width) * factor for factor in (1, 2, 4, 8)]


def checked_sizes(sizes: Sequence[int], flag: str) -> List[int]:
    """Ascending, each once. ConfigError for fewer than two, or one below 1."""
    found = sorted(set(sizes))
    if len(found) < 2 or found[0] < 1:
        raise ConfigError("at least two different sizes are needed, each 1 or more", key=flag, value=list(sizes),
                          suggestion="three or more, such as 64,128,256, tell a trend from an accident")  # fmt: skip
    return found


def _check_numbers(steps: int, seeds: int, lr: Optional[float]) -> None:
    if steps < 4:
        rule = "at least 4 updates: what starts at zero reaches every tensor only after the third"
        raise ConfigError(rule, key="--steps", value=steps)
    if seeds < 1:
        raise ConfigError("at least one run at every width", key="--seeds", value=seeds)
    if lr is not None and not 0 < lr < float("inf"):
        raise ConfigError("a learning rate is greater than 0", key="--lr", value=lr)


def _depth_config(config: Config, depths: Sequence[int], width: int) -> Config:
    """The configuration for the depth check. ConfigError for a model without branches or a depth that it cannot have."""
    if config.model.kind == "mlp":
        raise ConfigError("an mlp has no residual branches, so muP says nothing about its depth", key="--depths",
                          value=list(depths), suggestion="leave it out")  # fmt: skip
    narrow = at_width(config, width)
    for depth in depths:
        at_depth(narrow, depth)
    return narrow


def _measured(
    config: Config, task: Task, batch: Callable[[int], Batch], widths: Sequence[int], steps: int, seeds: int, say: Say
) -> Outcome:
    mup = derived.is_mup(config)

    def figures(which: Config, name: str, signatures: bool) -> Figures:
        rig = rig_of(which, batch, task.vocab)
        return measure(rig, widths, steps, seeds, lambda text: say(f"{name}: {text}"), signatures)

    own = figures(config, "mup" if mup else "standard", True)
    control = figures(standard(config), "standard", False) if mup else None
    settings = {
        "parametrization": config.mup.parametrization, "widths": list(widths), "steps": steps, "seeds": seeds,
        "lr": config.optimizer.lr, "optimizer": config.optimizer.kind, "rows": 0, "device": config.device,
    }  # fmt: skip
    return Outcome(settings, own, control, findings=find(own), verdicts=judge(own, control), diagnoses=diagnose(own))


def _add_depth(
    outcome: Outcome,
    config: Config,
    task: Task,
    batch: Callable[[int], Batch],
    depths: Sequence[int],
    steps: int,
    seeds: int,
    say: Say,
) -> None:
    """The depth check: the configuration's rule beside no rule."""
    without = config.model_copy(update={"mup": config.mup.model_copy(update={"depth_rule": "none"})})

    def figures(which: Config, name: str) -> Figures:
        rig: Rig = rig_of(which, batch, task.vocab, "depth")
        return measure(rig, depths, steps, seeds, lambda text: say(f"{name}: {text}"), signatures=False)

    ruled = derived.depth_mult(at_depth(config, 2 * config.mup.base_depth)) != 1.0
    outcome.deep = figures(config, "completep" if ruled else "no depth rule")
    outcome.plain_depth = figures(without, "no depth rule") if ruled else None
    outcome.settings["depths"] = list(depths)
    outcome.verdicts += judge_depth(outcome.deep, outcome.plain_depth)
    outcome.diagnoses += diagnose_depth(outcome.deep)


def _conclude(config: Config, outcome: Outcome, run: RunDirectory, strict: bool, seconds: float) -> Summary:
    """Write everything; VerdictFailed for a fail (and for an inconclusive verdict if `strict`)."""
    verdict = overall(outcome.verdicts)
    failed = verdict == FAIL or (strict and verdict == INCONCLUSIVE)
    table = format_table(outcome, verdict)
    artifacts = {**write_files(run.path, outcome, table, verdict), **_draw(run, outcome)}
    metrics = {
        "settings": outcome.settings,
        "verdicts": [each.as_dict() for each in outcome.verdicts],
        "faults": [each.code for each in outcome.diagnoses],
        "diagnosis": _reason(outcome),
        "growth": {name: _finite(growth(part)) for name, part in (("mup", outcome.mup), ("standard", outcome.control)) if part},
    }
    summary = make_summary(
        "coord-check",
        device=config.device,
        config_hash=config_hash(config),
        exit_code=VerdictFailed.exit_code if failed else 0,
        steps=outcome.settings["steps"],
        seconds=seconds,
        metrics=metrics,
        artifacts=artifacts,
    )
    summary.update(verdict=verdict)
    run.write_summary(summary)
    shown = {**summary, "table": f"{table}\nkept in {run.path}"}
    if failed:
        raise VerdictFailed(f"this model does not scale as muP says: {metrics['diagnosis']}", shown)
    return shown


def _reason(outcome: Outcome) -> str:
    """The diagnosis, or else what the verdicts that are no pass say."""
    if outcome.diagnoses:
        return "; ".join(each.text for each in outcome.diagnoses) + "."
    open_questions = [f"{each.name}: {each.text}" for each in outcome.verdicts if each.status != "pass"]
    return "; ".join(open_questions) + "." if open_questions else "everything scales as muP says."


def _finite(value: float) -> Optional[float]:
    return value if abs(value) < float("inf") else None


def _draw(run: RunDirectory, outcome: Outcome) -> Dict[str, str]:
    own = outcome.settings["parametrization"]
    rows = [(own, outcome.mup), ("standard", outcome.control)]
    deep = [("with the depth rule", outcome.deep), ("without", outcome.plain_depth)]
    drawn = {
        "changes_plot": plots.plot_coordinates(run.path / "changes.png", rows, "change", "x_t - x_0, root mean square"),
        "values_plot": plots.plot_coordinates(run.path / "values.png", rows, "mean_abs", "x_t, mean absolute value"),
        "updates_plot": plots.plot_updates(run.path / "updates.png", rows),
        "depth_plot": plots.plot_coordinates(run.path / "depth.png", deep, "change", "x_t - x_0, root mean square"),
    }
    return {name: str(path) for name, path in drawn.items() if path is not None}
