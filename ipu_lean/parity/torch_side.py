"""CPU or GPU: the mirror, through the same engine as training."""

from __future__ import annotations

from typing import Any, Dict

import torch
from torch import nn

from ipu_lean.config import Config
from ipu_lean.models import TrainStep
from ipu_lean.optim import Schedule, build_optimizer, build_schedule
from ipu_lean.parity.probe import Probe
from ipu_lean.parity.trace import Tensors
from ipu_lean.train.engines import TorchEngine
from ipu_lean.train.precision import autocast, to_precision
from ipu_lean.train.world import World

GRADIENTS = "autograd"


def backend(config: Config) -> str:
    """What computes, for the report."""
    return f"torch {torch.__version__}"


def make_engine(model: nn.Module, config: Config) -> TorchEngine:
    """The engine that `train` would use with one process."""
    return TorchEngine(
        TrainStep(model), lambda live: build_optimizer(live, config), build_schedule(config), config, World.current(config)
    )


def activations(model: nn.Module, config: Config, tokens: torch.Tensor) -> Tensors:
    """What the watched modules give for tokens `[micro, seq]`, in execution order."""
    world = World.current(config)
    probe = Probe(to_precision(model, config.precision).to(world.device)).eval()
    with torch.no_grad(), autocast(config.precision, world.device.type):
        found = probe(tokens.to(world.device))
    probe.release()
    return {name: tensor.detach().cpu() for name, tensor in zip(probe.names, found)}


def gradients(model: nn.Module, config: Config, tokens: torch.Tensor, labels: torch.Tensor) -> Tensors:
    """Mean gradient over the micro-batches of one update of `[rows, seq]`, before clipping, by the engine's own accumulation."""
    train = config.train.model_copy(update={"clip": None})
    memory = config.memory.model_copy(update={"fused_update": False})  # or no gradient would be left to compare
    kept: Dict[str, _Keep] = {}

    def make(live: nn.Module) -> torch.optim.Optimizer:
        kept["optimizer"] = _Keep(live)
        return kept["optimizer"]

    engine = TorchEngine(
        TrainStep(model), make, Schedule(), config.model_copy(update={"train": train, "memory": memory}), World.current(config)
    )
    engine.train_step((tokens.numpy(), labels.numpy()))
    engine.close()
    return kept["optimizer"].found


class _Keep(torch.optim.SGD):
    """An optimizer that keeps the gradients it is given and changes nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.found = model, {}
        super().__init__([{"params": list(model.parameters()), "initial_lr": 1.0}], lr=1.0)

    def step(self, closure: Any = None) -> None:
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            self.found[name] = gradient.detach().float().cpu().clone()
