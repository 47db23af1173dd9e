"""The optimizer of a configuration."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Dict, List, Mapping, Optional

import torch
from torch import nn

from ipu_lean.config import Config
from ipu_lean.errors import ConfigError
from ipu_lean.mup import Role, explain_rows, finite_base_shapes, shapes_of
from ipu_lean.optim.any_precision import AnyPrecisionAdamW
from ipu_lean.optim.any_precision_options import BETA_LIMIT
from ipu_lean.optim.groups import mu_groups
from ipu_lean.optim.state import settings_by_name

IMPLS: Dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


def build_optimizer(
    model: nn.Module,
    config: Config,
    impl: Optional[Callable[..., torch.optim.Optimizer]] = None,
    **extra: Any,
) -> torch.optim.Optimizer:
    """The optimizer that `config.optimizer` and `config.mup` describe, over `model`'s parameters and `model.roles`.

    Under `parametrization: standard` the code is the same and every multiplier of width is 1.

    Args:
        impl: another class of the same kind, such as `functools.partial(poptorch.optim.AdamW, accum_type=...)`.
        **extra: further arguments of the class, such as fused=True. lr, betas, eps, weight_decay go to the constructor too, so
            that PopTorch treats them as variable.
    Raises:
        ConfigError: the model has no roles, or a parameter none; options that contradict each other.
    """
    own = config.optimizer
    roles = getattr(model, "roles", None)
    if roles is None:
        raise ConfigError("the model has no `roles`, so learning rates are unknown", suggestion="build it with build_model")
    if config.mup.parametrization == "standard":
        roles = standard_roles(roles)
    if config.mup.decay == "independent" and own.kind == "adam":
        raise ConfigError(
            "Adam's decay passes through its normalisation, so it cannot be made independent of the learning rate",
            key="mup.decay",
            value="independent",
            suggestion="set `optimizer.kind: adamw`",
        )
    if own.nesterov and not own.momentum and own.kind == "sgd":
        raise ConfigError("Nesterov's form needs a momentum", key="optimizer.nesterov", value=True)
    groups = mu_groups(
        model.named_parameters(),
        roles,
        family="sgd" if own.kind == "sgd" else "adam",
        lr=own.lr,
        weight_decay=own.weight_decay,
        eps=None if own.kind == "sgd" else own.eps,
        decay_vectors=own.decay_vectors,
        decay=config.mup.decay,
    )
    options: Dict[str, Any] = {"lr": own.lr, "weight_decay": own.weight_decay}
    if own.kind == "sgd":
        options.update(momentum=own.momentum, nesterov=own.nesterov)
    else:
        options.update(betas=tuple(own.betas), eps=own.eps)
    if impl is None and config.precision == "bf16-pure":
        impl, options = AnyPrecisionAdamW, {**options, **pure_options(config)}
    return (impl or IMPLS[own.kind])(groups, **{**options, **extra})


def pure_options(config: Config) -> Dict[str, Any]:
    """What `precision: bf16-pure` asks of AnyPrecisionAdamW: everything in bf16 that can be."""
    own = config.optimizer
    momentum = torch.bfloat16 if own.betas[0] <= BETA_LIMIT else torch.float32
    return {"summation": own.summation, "variance": own.variance, "momentum_dtype": momentum, "seed": config.seed}


def standard_roles(roles: Mapping[str, Role]) -> Dict[str, Role]:
    """The same kinds with every multiplier of width 1."""
    return {name: replace(role, m_in=1.0, m_out=1.0) for name, role in roles.items()}


def explain_model(model: nn.Module, config: Config) -> List[Dict[str, Any]]:
    """Rows of the muP table for `model` (a `meta` one will do), with the settings that `build_optimizer` gives it."""
    shapes = shapes_of(model)
    base_shapes: Mapping[str, Any] = getattr(model, "base_shapes", None) or finite_base_shapes(shapes)
    settings = settings_by_name(model.named_parameters(), build_optimizer(model, config))
    return explain_rows(model.roles, shapes, base_shapes, settings)  # type: ignore[arg-type]
