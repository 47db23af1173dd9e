"""What both sides of a comparison begin with: the same weights, none of which mutes another's gradient, and the same batches."""

from __future__ import annotations

import copy
from typing import Any, Callable, Dict, List, Optional

import numpy as np
import torch
from torch import nn

from ipu_lean.config import Config
from ipu_lean.errors import ConfigError
from ipu_lean.models import TrainStep, build_model
from ipu_lean.parity.trace import Start, Tensors
from ipu_lean.train.tasks import open_task

# Share of the whole gradient's norm below which a float64 gradient is rounding noise (2e-16 an operation, thousands of them).
NOISE = 1e-11


def make_start(
    config: Config, updates: int, as_initialised: bool = False, progress: Optional[Callable[..., Any]] = None
) -> Start:
    """The configuration's model and the first `updates` global batches of its corpus.

    Matrices that start at zero (muP's query and readout) are drawn with standard deviation 1 / sqrt(fan in), since a zero matrix
    lets no gradient through, and numbers that are zero on both sides prove nothing; `as_initialised` leaves them.

    Raises: ConfigError for dropout, whose masks are not the same on two devices, and for a corpus that is too short.
    """
    check_comparable(config)
    task = open_task(config, progress)
    model = build_model(config, task.vocab)
    awake = copy.deepcopy(model)
    drawn = draw_zeros(awake, config.seed)
    source = task.train_batches()
    batches = [source.next() for _ in range(updates)]
    tokens = torch.from_numpy(np.stack([batch[0] for batch in batches]))
    labels = torch.from_numpy(np.stack([batch[1] for batch in batches]))
    micro = config.batch.micro
    zero = zero_gradients(awake, tokens[0, :micro], labels[0, :micro])
    weights = weights_of(model if as_initialised else awake)
    return Start(weights, tokens, labels, [] if as_initialised else drawn, zero, task.vocab)


def check_comparable(config: Config) -> None:
    """ConfigError for what gives other numbers on every device."""
    for key in ("dropout", "attention_dropout", "embedding_dropout"):
        value = getattr(config.model, key)
        if value:
            raise ConfigError(
                "devices draw different random numbers, so two runs with dropout cannot be compared",
                key=f"model.{key}",
                value=value,
                suggestion=f"add `model.{key}=0` to the command",
            )
    if config.ipu.synthetic_data:
        raise ConfigError("inputs are made on the device, so nothing can be compared", key="ipu.synthetic_data", value=True)


def weights_of(model: nn.Module) -> Tensors:
    """Parameters by name (tied ones once), copies."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@torch.no_grad()
def draw_zeros(model: nn.Module, seed: int) -> List[str]:
    """Draw the matrices that are all zero; returns their names. torch's global generator is left as it was."""
    generator = torch.Generator().manual_seed(seed + 1)
    drawn = []
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and not parameter.any():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            drawn.append(name)
    return drawn


def zero_gradients(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> List[str]:
    """Names of parameters whose gradient is zero in exact arithmetic, as far as float64 on one micro-batch can tell.

    The key's bias without rotary positions, for one: it adds the same number to all scores of a query.
    """
    twin = copy.deepcopy(model).double().train()
    if hasattr(twin, "set_engine"):
        twin.set_engine("store")
    loss, _ = TrainStep(twin)(tokens, labels)
    names = [name for name, _ in twin.named_parameters()]
    found = torch.autograd.grad(loss, list(twin.parameters()), allow_unused=True)
    norms: Dict[str, float] = {name: 0.0 if grad is None else grad.norm().item() for name, grad in zip(names, found)}
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    return [name for name, norm in norms.items() if norm <= NOISE * total]
