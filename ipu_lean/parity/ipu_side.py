"""IPU or emulator: the same calls to PopTorch on both."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ipu_lean.config import Config
from ipu_lean.config.layout import eval_device_iterations, is_half
from ipu_lean.ipu import PopTrainStep, load_poptorch, make_options, make_step, place, to_precision
from ipu_lean.ipu.optimizers import implementation
from ipu_lean.optim import build_schedule
from ipu_lean.parity.probe import Probe
from ipu_lean.parity.trace import Tensors

GRADIENTS = "one SGD update"


def backend(config: Config) -> str:
    """What computes, for the report."""
    version = getattr(load_poptorch(config.device), "__version__", "of unknown version")
    return f"PopTorch {version}" if config.device == "ipu" else f"emulator of PopTorch {version}, torch {torch.__version__}"


def make_engine(model: nn.Module, config: Config) -> Any:
    """The engine that `train` would use."""
    from ipu_lean.train.engines.poptorch_engine import PopTorchEngine

    return PopTorchEngine(model, config, build_schedule(config))


def activations(model: nn.Module, config: Config, tokens: torch.Tensor) -> Tensors:
    """What the watched modules give for tokens `[micro, seq]`, in execution order, by an inference model."""
    poptorch = load_poptorch(config.device)
    model = to_precision(model, config)
    PopTrainStep(model, poptorch)  # sets the model to what can be traced
    placement = place(model, config, poptorch)
    probe = Probe(model).eval()
    executor = poptorch.inferenceModel(probe, options=make_options(config, poptorch).eval)
    copies = eval_device_iterations(config) * config.batch.replicas
    found = executor(tokens.repeat(copies, 1))
    executor.destroy()
    placement.remove()
    probe.release()
    return {name: tensor[:1].detach().float().clone() for name, tensor in zip(probe.names, found)}


def gradients(model: nn.Module, config: Config, tokens: torch.Tensor, labels: torch.Tensor) -> Tensors:
    """Mean gradient over the micro-batches of one update of `[rows, seq]`, before clipping.

    PopTorch gives no gradient to Python (`p.grad` stays None), and anchored gradients do not compile for every model. One update
    of plain SGD at a rate so large that the old weight is lost in the rounding of the new one gives the gradient as
    (old - new) / rate, to the device's own precision; the rate is a power of two, so nothing else is rounded.
    """
    poptorch = load_poptorch(config.device)
    rate = 2.0**14 if is_half(config) else 2.0**24
    changes = {
        "batch": config.batch.model_copy(update={"device_iterations": 1}),
        "optimizer": config.optimizer.model_copy(update={"kind": "sgd", "momentum": 0.0, "nesterov": False}),
        "train": config.train.model_copy(update={"clip": None}),
    }
    config = config.model_copy(update=changes)
    model = to_precision(model, config).train()
    step = make_step(model, config, poptorch)
    placement = place(model, config, poptorch)
    before = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    optimizer = implementation(config, poptorch)(model.parameters(), lr=rate)
    executor = poptorch.trainingModel(step, options=make_options(config, poptorch).train, optimizer=optimizer)
    executor(tokens, labels)
    executor.copyWeightsToHost()
    after = {name: parameter.detach().double().clone() for name, parameter in model.named_parameters()}
    executor.destroy()
    placement.remove()
    return {name: ((before[name] - after[name]) / rate).float() for name in before}
