"""From configuration to model: muP's base shapes and roles on `meta`, then one initialisation on CPU."""

from __future__ import annotations

from typing import Optional

import torch

from ipu_lean.config import Config, derived
from ipu_lean.models.base import base_shapes_for
from ipu_lean.models.gpt import GPT
from ipu_lean.models.resolve import spec_of
from ipu_lean.mup import BaseShapes, attach_infshapes, compute_roles


def build_model(config: Config, vocab: Optional[int] = None) -> GPT:
    """The model on CPU in float32, initialised from `config.seed`; torch's global generator is left as it was.

    Args:
        vocab: the tokenizer's pieces; the rows of the embedding unless `model.vocab` asks for more.
    Raises:
        ConfigError: `model.vocab` is too small, or the muP base does not fit the model.
    """
    spec = spec_of(config, vocab)
    base_shapes = base_shapes_for(config, spec.vocab)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(config.seed)
        model = GPT(spec)
    return _with_roles(model, config, base_shapes)


def build_meta(config: Config, vocab: Optional[int] = None) -> GPT:
    """The same model on `meta`: shapes, roles and names without memory or random numbers."""
    spec = spec_of(config, vocab)
    base_shapes = base_shapes_for(config, spec.vocab)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = GPT(spec)
    return _with_roles(model, config, base_shapes)


def _with_roles(model: GPT, config: Config, base_shapes: BaseShapes) -> GPT:
    scaled = {name for name, _ in model.named_parameters() if name.startswith("layers.blocks.")}
    model.roles = compute_roles(model, base_shapes, depth_scaled=scaled, depth_mult=derived.depth_mult(config))
    model.base_shapes = base_shapes
    attach_infshapes(model, base_shapes)
    return model
