"""What a coordinate check runs: model, optimizer and one fixed batch as functions of a size; from a configuration, or by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import nn

from ipu_lean.config import Config, derived
from ipu_lean.config.checks import check
from ipu_lean.errors import ConfigError, as_written
from ipu_lean.models import build_model
from ipu_lean.optim import apply_schedule, build_optimizer, build_schedule

Batch = Tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Rig:
    """Callables that make one run of one size.

    Attributes:
        build: (size, seed) -> a freshly initialised model with `hidden`, `loss` and `blocks`.
        optimizer: model -> its optimizer.
        batch: seed -> (inputs, labels), the one batch of that seed's runs.
        advance: (optimizer, update from 0) sets learning rates before each update.
        family: `adam` or `sgd`. axis: what size is, `width` or `depth`.
        decays: weight decay acts apart from the gradient, so that it can be measured alone.
        configs: size -> configuration, for devices other than the CPU.
    """

    build: Callable[[int, int], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch: Callable[[int], Batch]
    advance: Callable[[torch.optim.Optimizer, int], None] = lambda optimizer, update: None
    family: str = "adam"
    axis: str = "width"
    decays: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    configs: Optional[Callable[[int], Config]] = None


def rig_of(config: Config, batch: Callable[[int], Batch], vocab: Optional[int], axis: str = "width") -> Rig:
    """The rig of a configuration, in fp32, without dropout, with everything kept that the backward pass needs.

    Args:
        batch: seed -> (inputs, labels). vocab: as `build_model` takes it. axis: `width`, or `depth` at the configuration's width.
    """
    config = plain(config)
    settings: Dict[int, Config] = {}

    def at(size: int) -> Config:
        if size not in settings:
            settings[size] = at_width(config, size) if axis == "width" else at_depth(config, size)
        return settings[size]

    def build(size: int, seed: int) -> nn.Module:
        model = build_model(at(size).model_copy(update={"seed": config.seed + seed}), vocab)
        model.rig_config = at(size)  # type: ignore[assignment]
        return model

    schedule = build_schedule(config)

    def advance(optimizer: torch.optim.Optimizer, update: int) -> None:
        # From the end of the warm-up on: rates at their peak, set the way that training sets them.
        apply_schedule(optimizer, schedule.lr_at(schedule.warmup + update))

    return Rig(
        build=build,
        optimizer=lambda model: build_optimizer(model, model.rig_config),  # type: ignore[arg-type]
        batch=batch,
        advance=advance,
        family="sgd" if config.optimizer.kind == "sgd" else "adam",
        axis=axis,
        decays=config.optimizer.kind != "adam" and config.optimizer.weight_decay > 0,
        device=torch.device("cuda") if config.device == "gpu" else torch.device("cpu"),
        configs=at,
    )


def plain(config: Config) -> Config:
    """The same mathematics without what hides it: fp32 (so nothing that keeps the bits of 16-bit weights), no dropout, no
    clipping, nothing recomputed."""
    default = type(config.optimizer)()
    model = config.model.model_copy(update={"dropout": 0.0, "attention_dropout": 0.0, "embedding_dropout": 0.0})
    changes: Dict[str, Any] = {
        "precision": "fp32",
        "optimizer": config.optimizer.model_copy(update={"summation": default.summation, "variance": default.variance}),
        "model": model,
        "memory": type(config.memory)(engine="store"),
        "train": config.train.model_copy(update={"clip": None}),
    }
    changes["batch"] = config.batch.model_copy(update={"device_iterations": 1})
    return config.model_copy(update=changes)


def at_width(config: Config, width: int) -> Config:
    """The configuration at another width. ConfigError for a width that the model cannot have."""
    return _checked(config.model_copy(update={"model": derived.at_width(config.model, width)}), "--widths", width)


def at_depth(config: Config, depth: int) -> Config:
    """The configuration at another depth."""
    model = config.model.model_copy(update={"depth": depth})
    return _checked(config.model_copy(update={"model": model}), "--depths", depth)


def standard(config: Config) -> Config:
    """The configuration under the standard parametrisation, the control."""
    mup = config.mup.model_copy(
        update={"parametrization": "standard", "base": None, "readout_zero_init": None, "query_zero_init": None,
                "depth_rule": "auto", "decay": "coupled"}
    )  # fmt: skip
    return config.model_copy(update={"mup": mup})


def with_rate(config: Config, lr: float) -> Config:
    """The configuration with another peak learning rate."""
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"lr": lr})})


def changed(rig: Rig, **parts: Any) -> Rig:
    """The rig with other callables."""
    return replace(rig, **parts)


def _checked(config: Config, flag: str, size: int) -> Config:
    try:
        check(config)
    except ConfigError as error:
        value = "" if error.value is None else f": {as_written(error.value)}"
        subject = "" if error.key is None else f"`{error.key}{value}`: "
        rule = f"the model cannot be of this size: {subject}{error.rule}"
        raise ConfigError(rule, key=flag, value=size, suggestion=error.suggestion) from error
    return config
