"""One side of a comparison: train from a given start on one device, and keep what can be compared."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

import torch
from torch import nn

from ipu_lean.config import Config, require_device
from ipu_lean.config.layout import IPU_DEVICES
from ipu_lean.errors import ConfigError
from ipu_lean.models import build_model
from ipu_lean.parity import ipu_side, torch_side
from ipu_lean.parity.trace import Start, Tensors, Trace, relative_distance
from ipu_lean.train.banner import versions
from ipu_lean.train.engines import Engine
from ipu_lean.train.precision import check_precision

Edit = Callable[[nn.Module], None]
Say = Callable[[str], None]
# Numbers of weights that are kept in all; longer or larger runs keep the states after 1, 2, 4, ... calls and the last.
_KEPT = 20_000_000


def for_device(config: Config, device: str) -> Config:
    """The same run on another device. A precision that only IPUs have becomes fp32 elsewhere: the reference is the better one.

    Raises: ConfigError and EnvironmentProblem, as starting a run there would.
    """
    from ipu_lean.config.checks import check

    precision = config.precision
    if precision == "fp16-ipu" and device not in IPU_DEVICES:
        precision = "fp32"
    changed = config.model_copy(update={"device": device, "precision": precision})
    check(changed)
    require_device(changed)
    if device not in IPU_DEVICES:
        check_precision(changed)
    return changed


def record(config: Config, start: Start, edit: Optional[Edit] = None, say: Say = lambda text: None) -> Trace:
    """Train `start.updates` updates on `config.device` and return the trace.

    Args:
        config: from `for_device`.
        edit: changes the model of this side before it is used (tests put faults in here).
        say: hears what is being done.

    Raises:
        ConfigError: the number of updates is no multiple of batch.device_iterations.
    """
    iterations = config.batch.device_iterations
    if start.updates % iterations:
        raise ConfigError(
            f"one device call makes batch.device_iterations = {iterations} updates, so --steps must be a multiple of it",
            key="--steps",
            value=start.updates,
            suggestion=f"use {max(1, round(start.updates / iterations)) * iterations}",
        )
    side: Any = ipu_side if config.device in IPU_DEVICES else torch_side

    def fresh() -> nn.Module:
        model = model_at(config, start)
        if edit is not None:
            edit(model)
        return model

    rows = slice(0, config.batch.micro)
    say(f"{config.device}: activations of the first micro-batch")
    activations = side.activations(fresh(), config, start.tokens[0, rows])
    say(f"{config.device}: gradients of the first update")
    gradients = side.gradients(fresh(), config, start.tokens[0], start.labels[0])
    engine = side.make_engine(fresh(), config)
    trace = Trace({}, start, engine.updates_per_call)
    trace.activations, trace.gradients = activations, gradients
    try:
        _train(engine, trace, say, config.device)
    finally:
        engine.close()
    if config.device not in IPU_DEVICES:
        trace.spread = _rounding_spread(fresh(), config, trace)
    trace.facts = {
        "device": config.device,
        "backend": side.backend(config),
        "precision": config.precision,
        "optimizer": config.optimizer.kind,
        "gradients": side.GRADIENTS,
        "versions": versions(),
        "threads": torch.get_num_threads(),
    }
    return trace


def _rounding_spread(model: nn.Module, config: Config, trace: Trace) -> Dict[int, Dict[str, float]]:
    """How far each weight moves by rounding alone: |u - u'| / |u| of a second run on this device that differs in nothing else.

    It starts one rounding error off, keeps activations instead of rebuilding them, and writes attention out. Adam divides a
    gradient by its own size, so where a gradient is (nearly) all rounding noise, two correct runs part, and no third can be
    judged by one of them.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            parameter.mul_(1.0 + signs.to(parameter.dtype) * torch.finfo(torch.float32).eps / 2)
    model.set_attention("explicit")
    model.set_engine("store")
    twin = Trace({}, trace.start, 1)
    engine = torch_side.make_engine(model, config)
    try:
        _train(engine, twin, lambda text: None, config.device)
    finally:
        engine.close()
    return {
        step: {name: relative_distance(weights[name], twin.weights[step][name]) for name in weights}
        for step, weights in trace.weights.items()
    }


def model_at(config: Config, start: Start) -> nn.Module:
    """The configuration's model with the weights of `start`. ConfigError if they do not fit."""
    model = build_model(config, start.vocab)
    own = dict(model.named_parameters())
    if list(own) != list(start.weights) or any(own[name].shape != start.weights[name].shape for name in own):
        raise ConfigError(
            "the configuration describes another model than the recorded start",
            key="--start",
            suggestion="use the configuration that the first trace was recorded with",
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(start.weights[name])
    return model


def _train(engine: Engine, trace: Trace, say: Say, device: str) -> None:
    start, per = trace.start, engine.updates_per_call
    calls = start.updates // per
    size = sum(tensor.numel() for tensor in start.weights.values())
    kept = kept_calls(calls, size)
    for call in range(calls):
        part = slice(call * per, (call + 1) * per)
        batch = tuple(array[part].reshape(-1, *array.shape[2:]).numpy() for array in (start.tokens, start.labels))
        result = engine.train_step(batch)  # type: ignore[arg-type]
        losses = result.losses or (result.loss,)
        trace.losses += [float(loss) for loss in losses]
        trace.lrs += [float(result.lr)] * len(losses)
        if call + 1 in kept:
            trace.weights[(call + 1) * per] = _weights(engine, list(start.weights))
    say(f"{device}: {calls * per} updates, loss {trace.losses[0]:.4f} -> {trace.losses[-1]:.4f}")


def _weights(engine: Engine, names: List[str]) -> Tensors:
    state: Dict[str, torch.Tensor] = engine.sync_to_host()
    return {name: state[name].detach().clone() for name in names}


def kept_calls(calls: int, size: int) -> List[int]:
    """Calls (from 1) after which weights of `size` numbers are kept: all if that is not too much, else powers of two."""
    if calls * size <= _KEPT:
        return list(range(1, calls + 1))
    powers = [1]
    while powers[-1] * 2 < calls:
        powers.append(powers[-1] * 2)
    return sorted({*powers, calls})
