"""Small IPU configurations, and models whose gradients are all alive."""

from __future__ import annotations

from typing import Any, Dict, Tuple

import numpy as np
import torch

from ipu_lean.config import Config, make_config
from ipu_lean.models import GPT, build_model

VOCAB = 61


def ipu_config(**changes: Any) -> Config:
    """4 layers of width 16 on two pipelined IPUs: tied, so F = 3 and 5 micro-batches; two updates a call."""
    base: Dict[str, Any] = {
        "seed": 7,
        "device": "ipu-emulated",
        "model": {"width": 16, "depth": 4, "heads": 2, "seq": 8, "vocab": VOCAB},
        "mup": {"base_width": 8},
        "data": {"tokenizer": {"kind": "bpe", "path": "x"}},  # any vocabulary: nothing is tokenised
        "batch": {"micro": 2, "accumulation": 5, "device_iterations": 2},
        "schedule": {"kind": "cosine", "warmup": 2},
        "train": {"steps": 8, "eval_every": 4, "save_every": 4},
        "ipu": {"layers_per_ipu": [2, 2]},
    }
    for name, value in changes.items():
        base[name] = {**base[name], **value} if isinstance(value, dict) and isinstance(base.get(name), dict) else value
    return make_config(**base)


def lively(config: Config, seed: int = 1) -> GPT:
    """The model with every parameter drawn at random: muP's zero-initialised query and readout would mute most gradients."""
    model = build_model(config, VOCAB)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            parameter.copy_(1 + 0.1 * noise if parameter.dim() == 1 else 0.2 * noise)
    return model


def batch_for(config: Config, updates: int, seed: int = 0) -> Tuple[np.ndarray, np.ndarray]:
    """(tokens, labels), int32 `[updates * global batch, seq]`; some labels are not counted."""
    draw = np.random.default_rng(seed)
    shape = (updates * config.batch.global_batch, config.model.seq)
    tokens = draw.integers(0, VOCAB, shape).astype(np.int32)
    labels = draw.integers(0, VOCAB, shape).astype(np.int32)
    labels[draw.random(shape) < 0.1] = -100
    return tokens, labels
