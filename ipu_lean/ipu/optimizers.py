"""MuAdamW, MuAdam and MuSGD over `poptorch.optim`: PopART's built-in update rules with our parameter groups.

PopTorch reads classes and numbers only; no Python of an optimizer runs on the device. Attributes may change after compilation
exactly if the constructor was given them, so `lr` goes there as well as into every group.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Callable, Dict

import torch
from torch import nn

from ipu_lean.config import Config
from ipu_lean.config.layout import accumulator, first_moment, loss_scaling
from ipu_lean.optim import build_optimizer

_TYPES = {"float": torch.float32, "half": torch.float16}


def make_optimizer(model: nn.Module, config: Config, poptorch: Any) -> torch.optim.Optimizer:
    """The configuration's optimizer over `model`'s own live parameters (PopTorch finds them by their memory)."""
    return build_optimizer(model, config, impl=implementation(config, poptorch))


def implementation(config: Config, poptorch: Any) -> Callable[..., torch.optim.Optimizer]:
    """The class with what only PopTorch has: accumulator types, loss scaling, clipping."""
    half = _TYPES[accumulator(config)]
    first = _TYPES[first_moment(config)]
    clip = math.inf if config.train.clip is None else config.train.clip
    shared: Dict[str, Any] = {"loss_scaling": loss_scaling(config), "max_grad_norm": clip}
    if config.optimizer.kind == "sgd":
        return partial(poptorch.optim.SGD, accum_type=half, velocity_accum_type=first, **shared)
    kind = poptorch.optim.AdamW if config.optimizer.kind == "adamw" else poptorch.optim.Adam
    return partial(
        kind, accum_type=half, first_order_momentum_accum_type=first, second_order_momentum_accum_type=torch.float32, **shared
    )
