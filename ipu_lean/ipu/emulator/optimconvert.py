"""From a Python optimizer to what the device keeps: kind, values, and which are constant (python/_optimizer_attributes.py)."""
from __future__ import annotations

import enum
import math
import numbers
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import torch

from . import enums, optim
from .log import logger
from .options import Options


class Kind(enum.IntEnum):
    """PopTorch's optimizer types; values as in the contract."""

    SGD1 = 0
    SGD2 = 1
    ADAM = 2
    ADAMW = 3
    ADAMW_NO_BIAS = 4
    RMSPROP = 5
    RMSPROP_CENTERED = 6
    LAMB = 7
    LAMB_NO_BIAS = 8


class Converted(NamedTuple):
    """`defaults` and each of `groups` map a name to (value, constant)."""

    kind: Kind
    attributes: Dict[str, Any]
    defaults: Dict[str, Tuple[Any, bool]]
    groups: List[Dict[str, Tuple[Any, bool]]]


_CLASSES = {Kind.SGD1: optim.SGD, Kind.SGD2: optim.SGD, Kind.ADAM: optim.Adam, Kind.ADAMW: optim.AdamW,
            Kind.ADAMW_NO_BIAS: optim.AdamW, Kind.RMSPROP: optim.RMSprop, Kind.RMSPROP_CENTERED: optim.RMSprop,
            Kind.LAMB: optim.LAMB, Kind.LAMB_NO_BIAS: optim.LAMB}
# For torch's own optimizers: constant when at this value, or (a bool) always or never (_optimizer_attributes.py:146-200).
_NATIVE_CONSTANT: Dict[str, Any] = {"lr": False, "betas": True, "alpha": True, "nesterov": True, "weight_decay": 0.0,
                                    "momentum": 0.0, "dampening": 0.0, "eps": 1e-8, "max_weight_norm": 65500.0,
                                    "velocity_scaling": 1.0, "loss_scaling": 1.0}
_TYPES = {"accum_type", "velocity_accum_type", "first_order_momentum_accum_type", "second_order_momentum_accum_type"}


class AttributeTracker:
    """Warns once about attributes that appear after the first conversion and mean nothing to PopART."""

    def __init__(self, options: Options) -> None:
        self.log: Callable[..., None] = logger.debug if options._relax_optimizer_checks else logger.warning
        self.known: Dict[str, List[str]] = {}
        self.recording = True
        self.said: List[str] = []

    def check(self, kind: str, provided: List[str], what: str, optimizer: str) -> None:
        known = self.known.setdefault(kind, [])
        extra = [name for name in provided if name not in known]
        if self.recording:
            known += extra
        elif extra:
            message = f"Ignoring unexpected {what} in {optimizer} optimizer: {extra}"
            if message not in self.said:
                self.said.append(message)
                self.log(message)


def kind_of(optimizer: torch.optim.Optimizer) -> Kind:
    """By class. AdamW is asked first: newer torch derives it from Adam. AssertionError for any other optimizer."""
    bases = type(optimizer).__bases__
    known = torch.optim.Optimizer in bases or optim.Optimizer in bases or type(optimizer).__module__.startswith("torch.")
    if not known:
        logger.warning("Optimizer %s is a subclass: its Python code is not run on the IPU", type(optimizer).__name__)
    if isinstance(optimizer, torch.optim.AdamW):
        if not getattr(optimizer, "bias_correction", True):
            logger.warning("AdamW(bias_correction=False) runs as plain bias-corrected Adam (CompilerImpl.cpp:868-884)")
            return Kind.ADAMW_NO_BIAS
        return Kind.ADAMW
    if isinstance(optimizer, torch.optim.Adam):
        return Kind.ADAM
    if isinstance(optimizer, torch.optim.SGD):
        return Kind.SGD1 if getattr(optimizer, "use_combined_accum", False) else Kind.SGD2
    if isinstance(optimizer, torch.optim.RMSprop):
        values = {bool(group["centered"]) for group in optimizer.param_groups}
        assert len(values) == 1, "All parameter groups must have the same value for the 'centered' attribute"
        return Kind.RMSPROP_CENTERED if values.pop() else Kind.RMSPROP
    assert isinstance(optimizer, optim.LAMB), (
        f"Unsupported optimizer type {type(optimizer).__name__}. Types supported: SGD, Adam, AdamW, RMSprop, LAMB")
    return Kind.LAMB if optimizer.bias_correction else Kind.LAMB_NO_BIAS


def convert(optimizer: torch.optim.Optimizer, tracker: AttributeTracker, options: Options, compiled: bool) -> Converted:
    """Read every attribute. ValueError: amsgrad, accumulator types, nan; AssertionError: lr that is no Python number."""
    kind = kind_of(optimizer)
    ours = _CLASSES[kind]
    _choose_mean_strategy(optimizer, options, compiled)
    automatic = options._Popart.options.get("automaticLossScalingSettings.enabled", False)
    variable = getattr(optimizer, "variable_attrs", None)
    if variable is not None and automatic:
        variable.markAsVariable("loss_scaling")

    def pair(source: Dict[str, Any], name: str) -> Tuple[Any, bool]:
        value = _value(source, name)
        if variable is not None:
            return value, variable.isConstant(name)
        rule = 1e-2 if name == "weight_decay" and kind == Kind.ADAMW else _NATIVE_CONSTANT[name]
        constant = rule if isinstance(rule, bool) else value == rule
        return value, constant and not (name == "loss_scaling" and automatic)

    names = [name for name in ours._group_vars if name not in ("amsgrad", "centered")]
    groups = []
    for source in [optimizer.defaults, *optimizer.param_groups]:
        if source.get("amsgrad"):
            raise ValueError("Only non-amsgrad Adam/AdamW optimizers are supported.")
        groups.append({name: pair(source, name) for name in names})
    groups[0]["loss_scaling"] = pair({"loss_scaling": getattr(optimizer, "loss_scaling", 1.0)}, "loss_scaling")
    only = [name for name in ours._child_only if name not in ("loss_scaling", "velocity_scaling")]
    attributes = {name: _attribute(optimizer, name) for name in only}
    _track(optimizer, tracker, kind)
    return Converted(kind, attributes, groups[0], groups[1:])


def _value(source: Dict[str, Any], name: str) -> Any:
    value = source.get(name, 1.0 if name == "velocity_scaling" else None)
    assert value is not None, f"Mandatory attribute {name} not found in optimizer group"
    if name == "betas":
        assert isinstance(value, tuple) and len(value) == 2, f"Expected a tuple of two numbers for betas, got {value}"
        for beta in value:
            assert isinstance(beta, numbers.Number), f"Expected a number for betas but got {beta}"
    else:
        assert isinstance(value, numbers.Number), f"Expected a number for {name} but got {value} instead"
    return value


def _attribute(optimizer: torch.optim.Optimizer, name: str) -> Any:
    default: Any = {"max_grad_norm": math.inf, "bias_correction": True}.get(name, False)
    value = getattr(optimizer, name, torch.float32 if name in _TYPES else default)
    if name in _TYPES and value not in (torch.float16, torch.float32):
        raise ValueError(f"{name} must be torch.float16 or torch.float32, not {value}")
    if name == "max_grad_norm" and math.isnan(value):
        raise ValueError("max_grad_norm must not be NaN")
    return value


def _choose_mean_strategy(optimizer: torch.optim.Optimizer, options: Options, compiled: bool) -> None:
    """float16 accumulators need a running mean: set before compilation, required after (:130-152)."""
    if getattr(optimizer, "accum_type", None) != torch.float16 or getattr(optimizer, "use_combined_accum", False):
        return
    running = enums.MeanReductionStrategy.Running
    if not compiled:
        options._unfreeze()
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(running)
        options._freeze()
    elif options.Training.meanAccumulationAndReplicationReductionStrategy != running:
        raise ValueError("The new optimizer's float16 accumulators need MeanReductionStrategy.Running, but the model is compiled")


def _track(optimizer: torch.optim.Optimizer, tracker: AttributeTracker, kind: Kind) -> None:
    skipped = {"defaults", "state", "param_groups", "variable_attrs"}
    tracker.check("group", list(optimizer.defaults), "default group variable", kind.name)
    tracker.check("optimizer", [name for name in vars(optimizer) if name not in skipped], "optimizer attribute", kind.name)
    for index, group in enumerate(optimizer.param_groups):
        tracker.check("group", [name for name in group if name != "params"], f"group {index} attribute", kind.name)
    tracker.recording = False
