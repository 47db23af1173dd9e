"""Optimizers whose groups follow muP, and schedules that keep the groups' ratios."""
from __future__ import annotations

from ipu_lean.optim.any_precision import AnyPrecisionAdamW
from ipu_lean.optim.build import build_optimizer, explain_model
from ipu_lean.optim.fused import FusedUpdate
from ipu_lean.optim.groups import Multipliers, mu_groups, multipliers
from ipu_lean.optim.mu import MuAdam, MuAdamW, MuSGD
from ipu_lean.optim.schedule import Schedule, apply_schedule, build_schedule
from ipu_lean.optim.state import group_settings, load_state, restore_groups, settings_by_name

__all__ = [
    "AnyPrecisionAdamW",
    "FusedUpdate",
    "MuAdam",
    "MuAdamW",
    "MuSGD",
    "Multipliers",
    "Schedule",
    "apply_schedule",
    "build_optimizer",
    "build_schedule",
    "explain_model",
    "group_settings",
    "load_state",
    "mu_groups",
    "multipliers",
    "restore_groups",
    "settings_by_name",
]
