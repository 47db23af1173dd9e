"""`check`: will this configuration trace, place and batch on IPUs? Everything that is wrong, before anybody queues for a POD."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch

from ipu_lean.config import Config, Loaded, config_hash
from ipu_lean.config.checks import check as check_config
from ipu_lean.config.layout import IPU_DEVICES, eval_device_iterations, layout
from ipu_lean.data import blank_batch, expected_vocab
from ipu_lean.errors import ConfigError, VerdictFailed
from ipu_lean.ipu.api import load_poptorch
from ipu_lean.ipu.examination import Examination, Finding, examine_step
from ipu_lean.ipu.optimizers import make_optimizer
from ipu_lean.ipu.options import describe_options, make_options
from ipu_lean.ipu.placement import place
from ipu_lean.ipu.plan.machine import MOST_IPUS
from ipu_lean.ipu.step import to_precision
from ipu_lean.ipu.surrogate import make_step
from ipu_lean.models import build_meta, build_model

SCHEMA = 1


@dataclass
class CheckResult:
    """The verdict on a configuration.

    Attributes:
        config: as it was checked, on an IPU device. findings: what is wrong; none for a pass. found: what was traced.
        placement: the allocation as text. batch, optimizer: the arithmetic, as text. options: PopTorch's, as text.
    """

    config: Config
    found: Examination = field(default_factory=Examination)
    placement: str = ""
    batch: List[str] = field(default_factory=list)
    optimizer: List[str] = field(default_factory=list)
    options: str = ""

    @property
    def findings(self) -> List[Finding]:
        """Violations, in the order of the rules."""
        return self.found.findings

    @property
    def verdict(self) -> str:
        """pass or fail."""
        return "fail" if self.findings else "pass"


def check(config: Config) -> CheckResult:
    """Trace the configuration's step on the emulator, without memory for its weights, whatever `device` says.

    A configuration for cpu or gpu is checked as if its device were an IPU.
    """
    changed = config if config.device in IPU_DEVICES else config.model_copy(update={"device": "ipu-emulated"})
    result = CheckResult(changed)
    try:
        check_config(changed)
    except ConfigError as error:
        result.found.add(_config_finding(error))
        return result
    _trace(result, build_meta)
    if result.found.unproven:  # gradients can be compared only where there are weights
        result.found = Examination()
        _trace(result, build_model)
    return result


def _trace(result: CheckResult, build: Callable[..., Any]) -> None:
    """Fill in the result from a model made by `build`."""
    changed, poptorch = result.config, load_poptorch("ipu-emulated")
    model = to_precision(build(changed, expected_vocab(changed)), changed)
    processes = _processes(changed)
    pair = make_options(_portable(changed), poptorch, replicas=changed.batch.replicas // processes)
    optimizer = make_optimizer(model, changed, poptorch)
    result.options, result.batch = describe_options(pair), _batch_lines(changed)
    try:
        step = make_step(model, changed, poptorch)
        placement = place(model, changed, poptorch)
    except ConfigError as error:
        result.found.add(_config_finding(error))
        return
    result.placement = placement.table
    train, evaluation = _batches(changed, processes)
    with _quiet():
        result.found = examine_step(
            step, train, options=pair.train, optimizer=optimizer, evaluation=(evaluation, pair.eval)
        )
    placement.remove()
    if processes > 1:
        result.found.ipus *= processes
        result.found.notes.append(_share(changed, processes))
    result.optimizer = _optimizer_lines(changed, optimizer)
    _stages_agree(result, placement.stages)


def run_check(loaded: Loaded) -> Dict[str, Any]:
    """The summary of `check`.

    Raises:
        VerdictFailed: something is wrong; the text says what, where and the usual remedies, and `summary` holds the rest.
    """
    config = loaded.config
    result = check(config)
    summary = {
        "schema": SCHEMA,
        "command": "check",
        "status": "ok",
        "verdict": result.verdict,
        "exit_code": 0 if result.verdict == "pass" else VerdictFailed.exit_code,
        "device": config.device,
        "config_hash": config_hash(config),
        "metrics": {
            "findings": [finding.as_dict() for finding in result.findings],
            "notes": result.found.notes,
            "ops": result.found.ops,
            "stages": result.found.stages,
            "forward_stages": result.found.forward_stages,
            "ipus": result.found.ipus,
            "kept": _kept_numbers(result.found),
            "options": result.options.splitlines(),
        },
        "artifacts": {},
        "table": format_check(result),
    }
    if result.verdict == "fail":
        count = len(result.findings)
        text = f"check found {count} thing{'' if count == 1 else 's'} that would not work on IPUs: "
        raise VerdictFailed(text + " ".join(str(finding) for finding in result.findings), summary)
    return summary


def _config_finding(error: ConfigError) -> Finding:
    return Finding("config", " ".join(str(error).split()), "both", "", error.file or "", error.line or 0)


def _portable(config: Config) -> Config:
    """An offline target would waive the rule that IPUs come in powers of two."""
    return config.model_copy(update={"ipu": config.ipu.model_copy(update={"offline_target": None})})


def _processes(config: Config) -> int:
    """The fewest that drive all replicas; several are started by poprun, and each holds as many replicas."""
    each, replicas = layout(config).ipus, config.batch.replicas
    fitting = (count for count in range(1, replicas + 1) if not replicas % count and each * replicas // count <= MOST_IPUS)
    return next(fitting, 1)


def _share(config: Config, processes: int) -> str:
    ipus = layout(config).ipus * config.batch.replicas
    return (
        f"one process drives at most {MOST_IPUS} of these {ipus} IPUs: start {processes} with poprun (docs/ipu.md). What was "
        f"traced is the share of one, {config.batch.replicas // processes} replicas"
    )


def _batches(config: Config, processes: int) -> Tuple[Tuple[torch.Tensor, ...], Tuple[torch.Tensor, ...]]:
    """Whole tensors of one process's training and evaluation call, shapes only."""
    rows = config.batch.global_batch * config.batch.device_iterations // processes
    eval_rows = config.batch.micro * config.batch.replicas * eval_device_iterations(config) // processes
    train, evaluation = (tuple(torch.from_numpy(array).to("meta") for array in blank_batch(config, count)) for count in
                         (rows, eval_rows))
    return train, evaluation


@contextmanager
def _quiet() -> Iterator[None]:
    """The emulator logs as PopTorch does; here everything is in the report."""
    from ipu_lean.ipu.emulator.log import logger

    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _batch_lines(config: Config) -> List[str]:
    batch = config.batch
    texts = "texts" if config.model.head == "classifier" else "rows"
    each = f"{texts} of {config.model.seq} tokens" if config.model.kind == "gpt" else "images"
    iterations = eval_device_iterations(config)
    rows = batch.global_batch * batch.device_iterations
    return [
        f"training call: {batch.micro} micro x {batch.accumulation} accumulation x {batch.replicas} replicas x "
        f"{batch.device_iterations} device iterations = {rows} {each}, {batch.device_iterations} updates",
        f"evaluation call: {batch.micro} micro x {batch.replicas} replicas x {iterations} device iterations = "
        f"{batch.micro * batch.replicas * iterations} rows",
    ]


def _optimizer_lines(config: Config, optimizer: torch.optim.Optimizer) -> List[str]:
    variable = getattr(optimizer, "variable_attrs", None)
    names = ["lr", "weight_decay", "momentum"] if config.optimizer.kind == "sgd" else ["lr", "betas", "eps", "weight_decay"]
    moving = [name for name in names if variable is None or not variable.isConstant(name)]
    tensors = sum(len(group["params"]) for group in optimizer.param_groups)
    return [
        f"{type(optimizer).__name__}: {len(optimizer.param_groups)} groups of {tensors} tensors; may change after compilation: "
        f"{', '.join(moving) or 'nothing'}"
    ]


def _kept_numbers(found: Examination) -> Optional[Dict[str, int]]:
    """Bytes of one micro-batch between its two passes, for `--json`."""
    kept = found.kept
    if kept is None:
        return None
    gradients = sum(kept.gradients.values())
    return {"activations": kept.activations, "gradients": gradients, "recomputed": kept.recomputed, "forward": kept.forward}


def _kept_lines(found: Examination) -> List[str]:
    kept = found.kept
    if kept is None:
        return []
    text = f"kept for the backward pass of a micro-batch: {kept.activations:,} bytes of activations"
    if kept.gradients:
        text += f", {sum(kept.gradients.values()):,} of gradients (one copy of {len(kept.gradients)} parameters)"
    if kept.recomputed:
        text += f"; {kept.recomputed:,} more while a layer is computed again"
    return [text]


def _stages_agree(result: CheckResult, planned: int) -> None:
    """Our own arithmetic (config/layout.py) against the stages that were traced; they differ only by a mistake of ours."""
    traced, pipelined = result.found.forward_stages, result.config.ipu.execution == "pipelined"
    if pipelined and traced and traced != planned:
        message = f"{traced} forward stages were traced and {planned} were planned"
        result.found.add(Finding("stages", message, "training"))


def format_check(result: CheckResult) -> str:
    """The report: placement, pipeline, batch, optimizer, operations, findings, verdict."""
    found, config = result.found, result.config
    lines: List[str] = []
    if result.placement:
        lines += [result.placement, ""]
    if found.forward_stages:
        lines.append(_pipeline_line(config, found))
    lines += result.batch + result.optimizer + _kept_lines(found)
    if found.ops:
        lines += ["", f"{'operation':<36}{'count':>6}  {'types':<22} handler"]
        for row in found.ops:
            lines.append(f"{row['op']:<36}{row['count']:>6}  {','.join(row['dtypes']):<22} {row['handler']}")
    lines += ["", *(f"note: {note}" for note in found.notes)]
    for number, finding in enumerate(found.findings, 1):
        lines.append(f"{number}. ({finding.phase}) {finding}")
    lines.append(f"verdict: {result.verdict}")
    return "\n".join(lines)


def _pipeline_line(config: Config, found: Examination) -> str:
    forward: int = found.forward_stages
    text = f"{found.ipus} IPU{'' if found.ipus == 1 else 's'}, {forward} forward stage{'' if forward == 1 else 's'}"
    if config.ipu.execution == "sharded":
        return f"{text}, one after another"
    needed: Optional[int] = 2 * forward - 1
    return f"{text}: training needs accumulation >= 2F-1 = {needed} (it is {config.batch.accumulation}), evaluation device " \
           f"iterations >= F = {forward} (they are {eval_device_iterations(config)})"
