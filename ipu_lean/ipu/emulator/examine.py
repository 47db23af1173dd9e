"""Would PopTorch compile and train this step? Everything that is wrong, not only the first thing, without running it.

    >>> report = examine(step, (tokens, labels), options=options, optimizer=optimizer)
    >>> report.violations   # what PopTorch or PopART would refuse
    >>> report.notes        # what they would accept without doing what it says
"""
from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from . import optimconvert
from .args import ArgsParser, micro_batch
from .checks import Violation, ipu_count, rounded
from .errors import Error
from .location import Where
from .options import Options
from .trace import Trace, functions, trace


class Report(NamedTuple):
    """What one look found.

    Attributes:
        violations, notes: in the order of the rules; each has a message and, where there is one, the place in the program.
        ops: one row for each op of the graph, see `Trace.ops`. functions: autograd.Function classes by name, and their place.
        forward_stages, ipus: F of the 2F-1 rule, and IPUs reserved (0 when the trace failed). trace: None when it failed.
    """

    violations: List[Violation]
    notes: List[Violation]
    ops: List[Dict[str, Any]]
    functions: Dict[str, Where]
    forward_stages: int
    ipus: int
    trace: Optional[Trace]


def examine(model: nn.Module, args: Tuple[Any, ...], kwargs: Optional[Dict[str, Any]] = None, *,
            options: Optional[Options] = None, training: bool = True,
            optimizer: Optional[torch.optim.Optimizer] = None) -> Report:
    """Trace `model` as a training or inference model of these options would, for one call's whole `args` and `kwargs`.

    The model is neither wrapped nor changed, the options are not frozen. Rules: arguments, batch, trace, and those of checks.py.
    """
    options = (options or Options()).clone()
    violations: List[Violation] = []
    if not training and options.Training.gradient_accumulation != 1:
        violations.append(Violation("accumulation", "Training.gradientAccumulation must be 1 in inference, it is "
                                                    f"{options.Training.gradient_accumulation}"))
    notes: List[Violation] = []
    if optimizer is not None:
        violations += _optimizer_rules(model, optimizer, options)
        notes += _optimizer_notes(model, optimizer)
    try:
        given = ArgsParser(model)(args, kwargs or {})
    except (Error, AssertionError) as error:
        return Report([*violations, Violation("arguments", str(error))], notes, [], {}, 0, 0, None)
    try:
        micro = given.map(lambda tensor: micro_batch(tensor.detach(), options))
    except AssertionError as error:
        violations.append(Violation("batch", str(error)))
        micro = given.map(lambda tensor: tensor.detach())
    try:
        traced = trace(model, micro.args, micro.kwargs, options, training)
    except (Error, AssertionError, RuntimeError, TypeError, ValueError) as error:
        return Report([*violations, Violation("trace", f"{type(error).__name__}: {error}")], notes, [], {}, 0, 0, None)
    violations += traced.violations
    notes += [Violation("note", message, where) for message, where in traced.notes]
    count = ipu_count(traced.live, options)
    return Report(violations, notes, traced.ops(), functions(traced.recorder, traced.live), traced.forward_stages,
                  rounded(count) if options.auto_round_num_ipus else count, traced)


def _optimizer_rules(model: nn.Module, optimizer: torch.optim.Optimizer, options: Options) -> List[Violation]:
    found = []
    try:
        optimconvert.convert(optimizer, optimconvert.AttributeTracker(options), options, False)
    except (AssertionError, ValueError) as error:
        found.append(Violation("optimizer", str(error)))
    known = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"])
    if foreign:
        found.append(Violation("optimizer", f"{foreign} of the optimizer's parameters are not in the model (a KeyError when "
                                            "compiling): build the optimizer on the model that is wrapped"))
    return found


def _optimizer_notes(model: nn.Module, optimizer: torch.optim.Optimizer) -> List[Violation]:
    """Trainable parameters in no group get the defaults (CompilerImpl.cpp:790-805); lr only in groups is constant."""
    found = []
    grouped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    lost = [name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in grouped]
    if lost:
        found.append(Violation("group", f"trainable parameters in no optimizer group are updated with its defaults: {lost}; "
                                        "freeze with requires_grad=False what must not move"))
    attributes = getattr(optimizer, "variable_attrs", None)
    if attributes is not None and attributes.isConstant("lr"):
        found.append(Violation("lr", "lr was not passed to the optimizer's constructor, so it cannot change after compilation: a "
                                     "schedule would fail"))
    return found
