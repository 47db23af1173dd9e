"""Configurations with models, placements and settings drawn at random, all of which the configuration's own rules accept."""

from __future__ import annotations

import random
from typing import Any, Dict, List

from ipu_lean.config import Config
from ipu_lean.errors import ConfigError
from tests.ipu.helpers import VOCAB, ipu_config


def cut(draw: random.Random, depth: int, ipus: int) -> List[int]:
    """Layers on each of `ipus`, at least one each; sometimes none on the first."""
    first = draw.random() < 0.3 and ipus > 1
    parts = ipus - 1 if first else ipus
    places = sorted(draw.sample(range(1, depth), parts - 1))
    shares = [after - before for before, after in zip([0, *places], [*places, depth])]
    return [0, *shares] if first else shares


def random_model(draw: random.Random, depth: int) -> Dict[str, Any]:
    """A model section of that depth."""
    stack: Dict[str, Any] = {"kind": draw.choice(["residual", "reversible"])}
    if stack["kind"] == "reversible":
        stack["coupling"] = draw.choice(["additive", "momentum", "mean", "affine"])
        stack["input"] = draw.choice(["duplicate", "split"]) if stack["coupling"] == "additive" else "auto"
        stack["order"] = draw.choice(["attn-ffn", "aaff"])
    return {
        "width": 16, "depth": depth, "heads": 2, "seq": 8, "vocab": VOCAB, "tied": draw.random() < 0.5, "stack": stack,
        "positions": draw.choice(["rotary", "learned", "sinusoidal", "none"]), "bias": draw.random() < 0.5,
        "norm": draw.choice(["layernorm", "rmsnorm"]), "activation": draw.choice(["gelu", "swiglu"]),
        "sandwich": draw.random() < 0.3,
        "num_hidden_groups": None if stack.get("order") == "aaff" else draw.choice([None, None, 2]),
    }


def random_config(draw: random.Random) -> Config:
    """A configuration for IPUs, at an accumulation that is always enough."""
    while True:
        depth, ipus = draw.choice([4, 6, 8]), draw.choice([1, 2, 2, 4, 4])
        section = {"layers_per_ipu": cut(draw, depth, ipus), "embedding_ipu": draw.choice([0, 0, 0, ipus - 1]),
                   "execution": draw.choice(["pipelined"] * 4 + ["sharded"])}
        model = random_model(draw, depth)
        batch = {"micro": draw.choice([1, 2]), "accumulation": 40, "device_iterations": 1}
        mup = {"parametrization": "standard", "base_width": None}
        try:
            return ipu_config(model=model, mup=mup, batch=batch, ipu=section)
        except ConfigError:
            continue  # shared layers on two IPUs, a block of two layers across a border, …
