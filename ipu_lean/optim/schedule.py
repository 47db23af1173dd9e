"""Learning-rate schedules as a factor on every group's own rate: a pure function of the update's index.

torch's schedulers with an absolute value in them flatten muP's groups: OneCycleLR and CyclicLR write one lr everywhere, and the
floors of CosineAnnealingLR (eta_min) and ReduceLROnPlateau (min_lr) are not divided by width. Here everything is relative.
"""
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional

import torch

from ipu_lean.config import Config
from ipu_lean.errors import ConfigError

KINDS = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class Schedule:
    """Factor on the learning rate of update u = 0, 1, …, with W = warmup, N = steps, f = final:

        u < W       (u + 1) / (W + 1)
        constant    1
        linear      1 - (1 - f) t              t = min(1, (u - W) / (N - W))
        cosine      f + (1 - f) (1 + cos(pi t)) / 2

    The factor is 1 at u = W; it would be f at u = N, one after the horizon's last update, and stays f from there.

    Raises:
        ConfigError: unknown kind; a horizon missing or not longer than the warm-up; `final` outside [0, 1] (it is a fraction of
            the peak: a floor in absolute terms would give every width another schedule).
    """

    kind: str = "constant"
    warmup: int = 0
    steps: Optional[int] = None
    final: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"must be one of {', '.join(KINDS)}", key="schedule.kind", value=self.kind)
        if self.warmup < 0:
            raise ConfigError("must be 0 or more updates", key="schedule.warmup", value=self.warmup)
        if not 0.0 <= self.final <= 1.0:
            raise ConfigError(
                "the rate at the end is a fraction of the peak, between 0 and 1",
                key="schedule.final",
                value=self.final,
                suggestion="an absolute floor is not offered: it would not scale with width",
            )
        if self.kind != "constant" and self.steps is None:
            raise ConfigError(f"a {self.kind} schedule needs its horizon in updates", key="schedule.steps")
        if self.kind != "constant" and self.steps is not None and self.steps <= self.warmup:
            raise ConfigError(
                f"the horizon of {self.steps} updates must be longer than the warm-up", key="schedule.warmup", value=self.warmup
            )

    def multiplier(self, update: int) -> float:
        """The factor of update `update` (0 is the first)."""
        if update < self.warmup:
            return (update + 1) / (self.warmup + 1)
        if self.kind == "constant" or self.steps is None:
            return 1.0
        t = min(1.0, (update - self.warmup) / (self.steps - self.warmup))
        if self.kind == "linear":
            return 1.0 - (1.0 - self.final) * t
        return self.final + (1.0 - self.final) * 0.5 * (1.0 + math.cos(math.pi * t))

    def lr_at(self, update: int, device_iterations: int = 1) -> float:
        """The factor on every device: an IPU call makes `device_iterations` updates and cannot change lr inside."""
        return self.multiplier(device_iterations * (update // device_iterations))


def build_schedule(config: Config) -> Schedule:
    """The schedule of a configuration; its horizon is `schedule.steps`, or else `train.steps`."""
    own = config.schedule
    return Schedule(own.kind, own.warmup, config.train.steps if own.steps is None else own.steps, own.final)


def apply_schedule(optimizer: torch.optim.Optimizer, multiplier: float) -> None:
    """Set every group's lr to its own `initial_lr` times `multiplier`: groups keep their ratios.

    Raises:
        ConfigError: a group has no `initial_lr` (not built by this package).
    """
    for index, group in enumerate(optimizer.param_groups):
        if "initial_lr" not in group:
            raise ConfigError(
                f"group {index} of the optimizer has no initial_lr, so its own rate is unknown",
                suggestion="build it with MuAdam, MuAdamW, MuSGD or build_optimizer",
            )
        group["lr"] = group["initial_lr"] * multiplier
