"""Both engines from the same weights and rows, and how far apart they end."""

from __future__ import annotations

from typing import Any, Dict, List, Tuple

import torch

from ipu_lean.config import Config
from ipu_lean.train.engines import PopTorchEngine, TorchEngine, make_engine
from ipu_lean.train.world import World
from tests.ipu.helpers import batch_for, lively

UPDATES = 6
SILENT = "key.linear.bias"  # its true gradient is zero, so Adam would compare noise


def on_cpu(config: Config) -> Config:
    return config.model_copy(update={"device": "cpu"})


def engines(config: Config, seed: int = 1) -> Tuple[PopTorchEngine, TorchEngine]:
    """Both engines from the same weights."""
    device = make_engine(lively(config, seed), config, World())
    host = make_engine(lively(config, seed), on_cpu(config), World())
    assert isinstance(device, PopTorchEngine) and isinstance(host, TorchEngine)
    return device, host


def calls(config: Config, updates: int = UPDATES, seed: int = 0) -> Tuple[List[Any], List[Any]]:
    """The same rows as the device's calls and as single updates."""
    tokens, labels = batch_for(config, updates, seed)
    each = config.batch.global_batch
    many = each * config.batch.device_iterations

    def cut(size: int) -> List[Any]:
        return [(tokens[i : i + size], labels[i : i + size]) for i in range(0, len(tokens), size)]

    return cut(many), cut(each)


def worst(one: Dict[str, torch.Tensor], other: Dict[str, torch.Tensor]) -> Tuple[float, str]:
    """The largest relative difference of a tensor, in norm, and its name."""
    assert list(one) == list(other)
    found = [
        (float((one[name] - other[name]).norm() / other[name].norm()), name)
        for name in one
        if one[name].is_floating_point() and SILENT not in name
    ]
    return max(found)
