"""`memory`: every precision by formula, and measured here, each in a fresh process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence

import ipu_lean
from ipu_lean.config import Config, Loaded, config_hash, dump_config, require_device
from ipu_lean.config.layout import IPU_DEVICES
from ipu_lean.data import expected_vocab
from ipu_lean.errors import ConfigError, IpuLeanError, RunError
from ipu_lean.ipu.plan.network import as_ipu, workload_of
from ipu_lean.ipu.plan.plan import make_plan
from ipu_lean.models import build_meta
from ipu_lean.train.commands import with_absolute_paths
from ipu_lean.train.memory.footprint import KINDS, predicted, sizes_of
from ipu_lean.train.memory.modes import Mode, chosen, on_device, with_mode
from ipu_lean.train.memory.plot import plot_memory
from ipu_lean.train.memory.report import format_table
from ipu_lean.train.precision import check_precision
from ipu_lean.train.runs import RunDirectory, make_summary

Summary = Dict[str, Any]
Say = Callable[[str], None]
# Large blocks straight from the system and back to it, and no buffers of the matrix library's own: what a process holds is then
# what its tensors hold.
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MKL_DISABLE_FAST_MM": "1"}


def run_memory(
    loaded: Loaded,
    out: Optional[str] = None,
    modes: Optional[Sequence[str]] = None,
    *,
    predict: bool = False,
    say: Say = lambda text: None,
) -> Summary:
    """Bytes of every mode, predicted and (unless `predict`) measured.

    Args:
        out: the directory; `runs/NAME-memory-TIME` unless given. modes: their names; all unless given.
        predict: formulas only; nothing is allocated, so the model may be too large for this machine.
    Raises:
        ConfigError, EnvironmentProblem: before anything was written. RunError: no mode could be measured.
    """
    started = time.perf_counter()
    RunDirectory.check_free(out)
    wanted = chosen(modes)
    if not predict and loaded.config.device == "gpu":
        require_device(loaded.config)
        check_precision(loaded.config.model_copy(update={"precision": "fp32"}), training=False)
    config = on_device(with_absolute_paths(loaded.config))
    vocab = expected_vocab(config)
    sizes = sizes_of(build_meta(config, vocab))
    run = RunDirectory.create(out, f"{config.name}-memory", dump_config(loaded.config))
    rows = []
    with run.in_one_go():
        for number, mode in enumerate(wanted):
            if not predict:
                say(f"{number + 1} of {len(wanted)}: {mode.name}")
            rows.append(_row(config, mode, sizes, vocab, predict))
    metrics = {
        "parameters": sum(sizes), "largest": max(sizes), "device": config.device, "rows": config.batch.micro,
        "seq": config.model.seq if config.model.kind == "gpt" else 1, "vocab": vocab, "predicted_only": predict, "modes": rows,
        "ipu": _on_ipu(loaded.config, sum(sizes)),
    }  # fmt: skip
    return _conclude(loaded.config, run, metrics, time.perf_counter() - started)


def _row(config: Config, mode: Mode, sizes: List[int], vocab: int, predict: bool) -> Dict[str, Any]:
    """One mode: `status` is ok, refused or failed; `difference`: measured bytes a parameter over predicted, less 1."""
    row: Dict[str, Any] = {"mode": mode.name, "status": "ok", "predicted": None, "measured": None, "difference": None}
    try:
        chosen_config = with_mode(config, mode)
        row["predicted"] = predicted(chosen_config, sizes, vocab).as_dict(sum(sizes))
        if predict:
            return row
        check_precision(chosen_config)
    except IpuLeanError as error:
        return {**row, "status": "refused", "reason": " ".join(str(error).split())}
    try:
        found = in_fresh_process(chosen_config, vocab)
    except RunError as error:
        return {**row, "status": "failed", "reason": str(error)}
    found["bytes_per_parameter"] = found["held"] / sum(sizes)
    difference = found["bytes_per_parameter"] / row["predicted"]["bytes_per_parameter"] - 1
    return {**row, "measured": found, "difference": difference}


def in_fresh_process(config: Config, vocab: int) -> Dict[str, Any]:
    """What worker.py measures. RunError if that process does not come to its end (memory ran out)."""
    package = str(Path(ipu_lean.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": path}
    command = [sys.executable, "-m", "ipu_lean.train.memory.worker"]
    order = json.dumps({"config": dump_config(config), "vocab": vocab})
    done = subprocess.run(command, input=order, capture_output=True, text=True, env=environment, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        reason = said[-1] if said else "it was killed; did memory run out?"
        raise RunError(f"the measuring process ended with {done.returncode}: {reason}")
    return json.loads(lines[-1])


def _on_ipu(config: Config, parameters: int) -> Dict[str, Any]:
    """fp16-ipu by formula, and what the plan says of it."""
    half = config.model_copy(update={"device": "ipu", "precision": "fp16-ipu"})
    try:
        half, notes = as_ipu(half)
        workload = workload_of(half)
        plan = make_plan(workload)
    except ConfigError as error:
        return {"mode": "fp16-ipu", "status": "refused", "reason": " ".join(str(error).split())}
    each = {"weights": workload.element, "gradients": workload.accumulator, "moments": sum(workload.moments), "compensation": 0}
    fullest = plan.fullest
    return {
        "mode": "fp16-ipu",
        "status": "ok",
        "notes": notes,
        "predicted": {**{kind: each[kind] * parameters for kind in KINDS}, "bytes_per_parameter": float(sum(each.values()))},
        "plan": {"ipus": workload.ipus, "verdict": plan.verdict, "fullest_bytes": fullest.before, "fullest_ipu": fullest.ipu},
    }


def _conclude(config: Config, run: RunDirectory, metrics: Dict[str, Any], seconds: float) -> Summary:
    table = format_table(metrics)
    (run.path / "memory.txt").write_text(table + "\n", encoding="utf-8")
    picture = plot_memory(metrics, run.path / "memory.png", config.name)
    artifacts = {"run": str(run.path), "table": str(run.path / "memory.txt"), "plot": str(picture)}
    rows = metrics["modes"]
    failed = not metrics["predicted_only"] and not any(row["status"] == "ok" for row in rows)
    device = metrics["device"] if config.device in IPU_DEVICES else config.device
    summary = make_summary(
        "memory", device=device, config_hash=config_hash(config), seconds=seconds, metrics=metrics, artifacts=artifacts
    )
    if failed:
        error = f"no mode could be measured: {'; '.join(sorted({row['reason'] for row in rows}))}"
        run.write_summary({**summary, "status": "failed", "exit_code": RunError.exit_code, "error": error})
        raise RunError(error)
    run.write_summary(summary)
    return {**summary, "table": f"{table}\nkept in {run.path}"}
