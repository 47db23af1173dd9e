"""Small models for the tests of this folder."""

from __future__ import annotations

import torch

from ipu_lean.config import make_config
from ipu_lean.models import build_model

TINY = {"width": 16, "depth": 2, "heads": 2, "seq": 12, "vocab": 23}


def config_of(mup=None, vocab=True, **model):
    """A tiny configuration; `model` keys replace those of TINY, `stack` and the like are sections."""
    sizes = {**TINY, **model}
    sections = {key: sizes.pop(key) for key in ("memory", "seed", "data", "device") if key in sizes}
    return make_config(
        model=sizes, mup=mup or {"parametrization": "standard"}, data={"tokenizer": {"kind": "bpe", "path": "t"}}, **sections
    )


def tiny(mup=None, randomise=True, **model):
    """A tiny model in which nothing is zero (query, readout and biases drawn), so that no gradient is muted."""
    found = build_model(config_of(mup, **model))
    return awake(found) if randomise else found


def awake(model):
    """The model with every parameter drawn."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = 1.0 if name.endswith("norm.weight") or "norm_after.weight" in name else 0.0
            parameter.copy_(gain + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def tokens_for(model, batch=2, seq=None, seed=0):
    """Random tokens and labels `[batch, seq]`, int32."""
    generator = torch.Generator().manual_seed(seed)
    shape = (batch, seq or model.spec.seq)
    return tuple(torch.randint(0, model.spec.vocab, shape, generator=generator, dtype=torch.int32) for _ in range(2))
