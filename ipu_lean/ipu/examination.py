"""One step under the rules of PopTorch: every violation with its place and its usual remedy, and the tables of what was traced.

It is always the emulator that looks, also where the real PopTorch is installed: PopTorch stops at its first complaint, and does
not say in which module it was.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from ipu_lean.ipu import contract
from ipu_lean.ipu.emulator import Error, Options, graph, optable
from ipu_lean.ipu.emulator.args import micro_batch
from ipu_lean.ipu.emulator.examine import Report, examine
from ipu_lean.ipu.emulator.kept import Kept, kept_for_backward
from ipu_lean.ipu.emulator.structures import flatten
from ipu_lean.ipu.emulator.verify import gradient_gaps
from ipu_lean.ipu.remedies import remedy

# float64 on both sides: two correct gradients differ by rounding, far below this.
_GAP = 1e-8


@dataclass(frozen=True)
class Finding:
    """One violated rule. `module` is the path in the model ("" for the step itself); `file` and `line` are the user's."""

    rule: str
    message: str
    phase: str
    module: str = ""
    file: str = ""
    line: int = 0

    @property
    def remedy(self) -> str:
        """What usually helps."""
        return remedy(self.rule, self.message)

    def as_dict(self) -> Dict[str, Any]:
        """Plain JSON."""
        return {**self.__dict__, "remedy": self.remedy}

    def __str__(self) -> str:
        module = f"module `{self.module}`" if self.module else ""
        place = ", ".join(part for part in (module, f"{self.file}:{self.line}" if self.file else "") if part)
        text = f"[{self.rule}] {self.message.rstrip('.')}" + (f" ({place})" if place and place not in self.message else "")
        return f"{text}. Remedy: {self.remedy}." if self.remedy else f"{text}."


@dataclass
class Examination:
    """What was found in a training step and, if it was given, its evaluation.

    Attributes:
        findings: in the order of the rules. notes: what PopTorch does otherwise than Python, and rightly so here.
        ops: rows (op, count, dtypes, handler); handler is PopTorch's file and line, "host" for what is evaluated from constants.
        stages: rows (stage, ipu, ops). forward_stages: F. ipus: of all replicas.
        kept: bytes that one micro-batch keeps for its backward pass; None for a step that would not compile, or that holds
            operations without shape rules.
        unproven: autograd.Function classes whose gradients could not be compared, because the weights were on `meta`.
    """

    findings: List[Finding] = field(default_factory=list)
    notes: List[str] = field(default_factory=list)
    ops: List[Dict[str, Any]] = field(default_factory=list)
    stages: List[Dict[str, int]] = field(default_factory=list)
    forward_stages: int = 0
    ipus: int = 0
    kept: Optional[Kept] = None
    unproven: List[str] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        """Keep it, once for training and evaluation together."""
        for index, known in enumerate(self.findings):
            if (known.rule, known.message, known.file, known.line) == (finding.rule, finding.message, finding.file, finding.line):
                if known.phase != finding.phase:
                    self.findings[index] = Finding(**{**known.__dict__, "phase": "both"})
                return
        self.findings.append(finding)


def examine_step(
    step: nn.Module,
    args: Sequence[torch.Tensor],
    *,
    options: Any = None,
    optimizer: Optional[torch.optim.Optimizer] = None,
    evaluation: Optional[Tuple[Sequence[torch.Tensor], Any]] = None,
) -> Examination:
    """Trace `step` for training and, if given, for evaluation; it is neither wrapped nor changed.

    Args:
        args: one call's whole tensors; on `meta` they will do. options, optimizer: the emulator's.
        evaluation: (one call's tensors, options) of the inference model.
    """
    found = Examination()
    training = step.training
    step.train()
    report = examine(step, tuple(args), options=options, optimizer=optimizer)
    _collect(found, report, "training")
    found.ops, found.stages = op_rows(report), _stage_rows(report.ops)
    found.forward_stages, found.ipus = report.forward_stages, report.ipus
    found.kept = _kept(report, options)
    _trainable(found, step, report)
    _backward_code(found, step, args, options, report)
    if evaluation is not None:
        step.eval()
        _collect(found, examine(step, tuple(evaluation[0]), options=evaluation[1], training=False), "evaluation")
    step.train(training)
    return found


def _collect(found: Examination, report: Report, phase: str) -> None:
    for violation in report.violations:
        where = violation.where
        place = {} if where is None else {"module": where.module, "file": where.file, "line": where.line}
        found.add(Finding(violation.rule, violation.message, phase, **place))
    for note in report.notes:
        where = note.where
        if "backward of autograd.Function" in note.message:
            continue  # judged by its numbers, below
        place = {} if where is None or not where.file else {"module": where.module, "file": where.file, "line": where.line}
        found.add(Finding(note.rule, note.message, phase, **place))


def _kept(report: Report, options: Any) -> Optional[Kept]:
    if report.trace is None or report.violations:
        return None
    try:
        return kept_for_backward(report.trace, options)
    except (NotImplementedError, RuntimeError):
        return None


def _trainable(found: Examination, step: nn.Module, report: Report) -> None:
    """Trainable parameters that the marked loss does not reach: PopART updates them with a gradient of zero, decay included."""
    if report.trace is None or any(finding.rule == "loss" for finding in found.findings):
        return
    recorder = report.trace.recorder
    losses, _ = graph.final_losses(recorder.graph, report.trace.live)
    reached = set()
    open_nodes = list(losses)
    while open_nodes:
        node = open_nodes.pop()
        if node in reached or node.meta.get("op") == "aten::detach":
            continue
        reached.add(node)
        open_nodes += node.all_input_nodes
    names = {node.meta["name"] for node in reached if node.meta.get("kind") == "parameter"}
    lost = [name for name, parameter in step.named_parameters() if parameter.requires_grad and name not in names]
    if lost:
        shown = ", ".join(lost[:4]) + (" …" if len(lost) > 4 else "")
        found.notes.append(f"{len(lost)} trainable parameters do not influence the loss: {shown}")


def _backward_code(found: Examination, step: nn.Module, args: Sequence[torch.Tensor], options: Any, report: Report) -> None:
    """Custom autograd functions are allowed if PopTorch's derivative of their forward is what their backward says."""
    if any(tensor.is_meta for tensor in step.parameters()):
        found.unproven = list(report.functions)
        return
    if not report.functions:
        return
    for name, where in report.functions.items():
        found.notes.append(f"PopTorch ignores the backward of autograd.Function {name} and differentiates its forward ({where})")
    try:
        micro = [_with_values(micro_batch(tensor, options or Options())) for tensor in args]
        gaps = gradient_gaps(step, tuple(micro), options=options, loss_of=_loss_of)
    except (Error, AssertionError, RuntimeError, StopIteration) as error:
        if not found.findings:  # what stops the trace has been reported already
            found.add(Finding("backward", f"gradients could not be compared: {type(error).__name__}: {error}", "training"))
        return
    worst = max(gaps, key=lambda name: gaps[name], default=None)
    if worst is None or not gaps[worst] > _GAP:
        return
    name, where = next(iter(report.functions.items()))
    message = (
        f"autograd.Function {name} has a backward that is not the derivative of its forward, and PopTorch ignores it: the "
        f"gradient of {worst} would differ by {gaps[worst]:.2g} (relative, float64)"
    )
    found.add(Finding("backward", message, "training", where.module, where.file, where.line))


def _with_values(tensor: torch.Tensor) -> torch.Tensor:
    """A shape-only input filled in: a ramp, or zeros for integers, which are valid tokens and labels."""
    if not tensor.is_meta:
        return tensor
    if tensor.is_floating_point():
        return torch.linspace(-1, 1, tensor.numel()).reshape(tensor.shape).to(tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _loss_of(result: Any) -> torch.Tensor:
    """The scalar that can be differentiated, among what a step returns."""
    return next(tensor for tensor in flatten(result) if tensor.requires_grad and tensor.numel() == 1)


# Tables.


def op_rows(report: Report) -> List[Dict[str, Any]]:
    """One row an op: how often, in which types, and who lowers it."""
    if report.trace is None:
        return []
    handlers = contract.handlers()
    nodes: Dict[str, List[Dict[str, Any]]] = {}
    for node in report.trace.recorder.graph.nodes:
        if node in report.trace.live and node.meta.get("kind") == "op":
            nodes.setdefault(node.meta["op"], []).append(node.meta)
    rows = []
    for name in sorted(nodes):
        types = sorted({str(dtype).replace("torch.", "") for meta in nodes[name] for dtype in meta["dtypes"]})
        constant = all(meta["constant"] for meta in nodes[name])
        rows.append({"op": name, "count": len(nodes[name]), "dtypes": types, "handler": _handler(name, constant, handlers)})
    return rows


def _handler(name: str, constant: bool, handlers: Dict[str, str]) -> str:
    base = optable.base_name(name)
    for candidate in (name, f"aten::{base}", f"aten::{optable._SAME.get(base, base)}"):
        if candidate in handlers:
            return handlers[candidate].split("/")[-1]
    if constant:
        return "evaluated on the host"
    if not name.startswith("aten::"):
        return "PopTorch's own"
    return "dispatcher" if optable.is_supported(name) else "none"


def _stage_rows(ops: Sequence[Dict[str, Any]]) -> List[Dict[str, int]]:
    counts: Counter = Counter((row["stage"], row["ipu"]) for row in ops if not row["constant"])
    return [{"stage": stage, "ipu": ipu, "ops": count} for (stage, ipu), count in sorted(counts.items())]
