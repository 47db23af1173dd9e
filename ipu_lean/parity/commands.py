"""`parity`, `parity record`, `parity compare`: from configurations or recorded traces to a verdict and its summary."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Optional

from ipu_lean.config import Config, Loaded, config_hash, dump_config
from ipu_lean.errors import ConfigError, IpuLeanError, VerdictFailed
from ipu_lean.parity.compare import Comparison, Tolerances, compare
from ipu_lean.parity.record import Edit, for_device, record
from ipu_lean.parity.report import format_table, write_report
from ipu_lean.parity.start import check_comparable, make_start
from ipu_lean.parity.trace import Trace, load_trace
from ipu_lean.train.commands import with_absolute_paths
from ipu_lean.train.runs import RunDirectory, make_summary

Summary = Dict[str, Any]
Say = Callable[[str], None]
STEPS = 20


def run_parity(
    loaded: Loaded,
    reference: str = "cpu",
    candidate: str = "ipu-emulated",
    steps: Optional[int] = None,
    out: Optional[str] = None,
    *,
    tolerances: Mapping[str, float] = {},  # noqa: B006 - read only
    as_initialised: bool = False,
    strict: bool = False,
    say: Say = lambda text: None,
    edit: Optional[Edit] = None,
) -> Summary:
    """Train the same updates on two devices and compare everything.

    Args:
        reference, candidate: devices. steps: weight updates; 20 (rounded up to whole device calls) unless given.
        out: run directory; `runs/NAME-parity-TIME` unless given. tolerances: by name, see `Tolerances`.
        as_initialised: leave matrices that start at zero alone. strict: an inconclusive verdict fails as well.
        edit: changes the candidate's model before it is used (tests put faults in here).

    Raises:
        ConfigError, EnvironmentProblem: before anything was written.
        VerdictFailed: they differ; everything is in the run directory all the same.
    """
    started = time.perf_counter()
    RunDirectory.check_free(out)
    check_tolerances(tolerances)
    config = with_absolute_paths(loaded.config)
    iterations = config.batch.device_iterations
    updates = -(-STEPS // iterations) * iterations if steps is None else steps
    if updates < 1 or updates % iterations:
        raise ConfigError(
            f"one device call makes batch.device_iterations = {iterations} updates, so this must be a multiple of it",
            key="--steps",
            value=updates,
            suggestion=f"use {max(1, round(updates / iterations)) * iterations}",
        )
    sides = [for_device(config, device) for device in (reference, candidate)]
    start = make_start(config, updates, as_initialised)
    run = RunDirectory.create(out, f"{config.name}-parity", dump_config(config))
    try:
        with run.in_one_go():
            one = record(sides[0], start, say=say)
            other = record(sides[1], start, edit, say)
    except IpuLeanError as error:
        failed = {"status": "failed", "exit_code": error.exit_code, "error": str(error)}
        run.write_summary(make_summary("parity", device=candidate, config_hash=config_hash(config), **failed))
        raise
    comparison = compare(one, other, tolerances)
    artifacts = write_report(run.path, comparison, one, other)
    seconds = time.perf_counter() - started
    return _conclude("parity", config, comparison, one, other, artifacts, strict, run=run, seconds=seconds)


def run_record(
    loaded: Loaded,
    device: Optional[str],
    out: str,
    steps: Optional[int] = None,
    start_from: Optional[str] = None,
    *,
    as_initialised: bool = False,
    say: Say = lambda text: None,
) -> Summary:
    """Train on one device and keep the trace in the directory `out`, to be compared on any machine.

    Args:
        device: the configuration's unless given. start_from: another trace's directory, whose weights and batches are used.
    """
    started = time.perf_counter()
    RunDirectory.check_free(out)
    config = for_device(with_absolute_paths(loaded.config), device or loaded.config.device)
    check_comparable(config)
    if start_from is not None:
        start = load_trace(Path(start_from)).start
        if steps is not None and steps != start.updates:
            raise ConfigError(f"{start_from} holds batches for {start.updates} updates", key="--steps", value=steps)
    else:
        iterations = config.batch.device_iterations
        start = make_start(config, -(-STEPS // iterations) * iterations if steps is None else steps, as_initialised)
    trace = record(config, start, say=say)
    path = trace.save(Path(out), dump_config(config))
    return make_summary(
        "parity record",
        device=config.device,
        config_hash=config_hash(config),
        steps=start.updates,
        tokens=int(start.labels.numel()),
        seconds=time.perf_counter() - started,
        metrics={"losses": trace.losses, "start": start.digest(), **trace.facts},
        artifacts={"trace": str(path)},
    )


def run_compare(
    first: str,
    second: str,
    out: Optional[str] = None,
    *,
    tolerances: Mapping[str, float] = {},  # noqa: B006 - read only
    strict: bool = False,
) -> Summary:
    """Compare two recorded traces; `first` is the reference. The report goes to `out` (default: beside the second trace)."""
    check_tolerances(tolerances)
    if out is not None:
        RunDirectory.check_free(out)
    one, other = load_trace(Path(first)), load_trace(Path(second))
    comparison = compare(one, other, tolerances)
    artifacts = write_report(Path(out or second), comparison, one, other)
    return _conclude("parity compare", None, comparison, one, other, artifacts, strict)


def check_tolerances(tolerances: Mapping[str, float]) -> None:
    """ConfigError for a name that there is not, or a number that is not positive."""
    known = list(Tolerances.__dataclass_fields__)
    for name, value in tolerances.items():
        if name not in known:
            raise ConfigError(f"the tolerances are {', '.join(known)}", key="--tolerance", value=name)
        if not value > 0:
            raise ConfigError("a tolerance is greater than 0", key="--tolerance", value=f"{name}={value}")


def _conclude(
    command: str,
    config: Optional[Config],
    comparison: Comparison,
    one: Trace,
    other: Trace,
    artifacts: Dict[str, str],
    strict: bool,
    run: Optional[RunDirectory] = None,
    seconds: float = 0.0,
) -> Summary:
    """Write the summary; VerdictFailed for a fail (and for an inconclusive verdict if `strict`)."""
    failed = comparison.verdict == "fail" or (strict and comparison.verdict == "inconclusive")
    worst = {kind: comparison.worst(kind) for kind in ("activation", "gradient", "loss", "weight")}
    first = comparison.as_dict()["first"]
    metrics: Dict[str, Any] = {
        "first": first,
        "diagnosis": comparison.diagnosis,
        "worst": {kind: None if row is None else {"name": row.name, "step": row.step, "relative": row.relative}
                  for kind, row in worst.items()},
        "left_out": comparison.named("left out"),
        "zero_gradients": comparison.named("zero"),
        "muted": comparison.named("muted"),
        "losses": {"reference": one.losses, "candidate": other.losses},
        "reference": one.facts,
        "candidate": other.facts,
    }
    summary = make_summary(
        command,
        device=str(other.facts["device"]),
        config_hash="" if config is None else config_hash(config),
        exit_code=VerdictFailed.exit_code if failed else 0,
        steps=min(len(one.losses), len(other.losses)),
        seconds=seconds,
        metrics=metrics,
        artifacts=artifacts,
    )
    summary.update(verdict=comparison.verdict)
    if run is not None:
        run.write_summary(summary)
    # Not in the file, where parity.txt holds it.
    shown = {**summary, "table": format_table(comparison, one, other)}
    if failed:
        text = f"{one.facts['device']} and {other.facts['device']} do not agree: "
        if comparison.first is not None:
            row = comparison.first
            text += f"the {row.kind} `{row.name}` differs first, at step {row.step} (relative {row.relative:.2e}); "
        raise VerdictFailed(text + comparison.diagnosis, shown)
    return shown
