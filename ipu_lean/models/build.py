"""From configuration to model: muP's base shapes and roles on `meta`, then one initialisation on CPU."""

from __future__ import annotations

from typing import Callable, Optional, Tuple, Union

import torch

from ipu_lean.config import Config, derived
from ipu_lean.models.base import base_shapes_for
from ipu_lean.models.classifier import make_gpt
from ipu_lean.models.gpt import GPT
from ipu_lean.models.mlp import MLP
from ipu_lean.models.resolve import spec_of
from ipu_lean.models.resolve_mlp import mlp_base_shapes, mlp_spec
from ipu_lean.mup import BaseShapes, attach_infshapes, compute_roles

Model = Union[GPT, MLP]


def build_model(config: Config, vocab: Optional[int] = None) -> Model:
    """The model on CPU in float32, initialised from `config.seed`; torch's global generator is left as it was.

    Args:
        vocab: what the data has, a task's `vocab`. Text: the tokenizer's pieces, which are the rows of the embedding unless
            `model.vocab` asks for more. Images: the classes.
    Raises:
        ConfigError: `model.vocab` is too small, or the muP base does not fit the model.
    """
    make, base_shapes = _plan(config, vocab)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(config.seed)
        model = make()
    return _with_roles(model, config, base_shapes)


def build_meta(config: Config, vocab: Optional[int] = None) -> Model:
    """The same model on `meta`: shapes, roles and names without memory or random numbers."""
    make, base_shapes = _plan(config, vocab)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = make()
    return _with_roles(model, config, base_shapes)


def _plan(config: Config, vocab: Optional[int]) -> Tuple[Callable[[], Model], BaseShapes]:
    """(what makes the model, its base shapes)."""
    if config.model.kind == "mlp":
        mlp = mlp_spec(config, vocab)
        return lambda: MLP(mlp), mlp_base_shapes(config, mlp)
    spec = spec_of(config, vocab)
    return lambda: make_gpt(spec), base_shapes_for(config, spec.vocab)


def _with_roles(model: Model, config: Config, base_shapes: BaseShapes) -> Model:
    scaled = {name for name, _ in model.named_parameters() if name.startswith("layers.blocks.")}
    model.roles = compute_roles(model, base_shapes, depth_scaled=scaled, depth_mult=derived.depth_mult(config))
    model.base_shapes = base_shapes
    attach_infshapes(model, base_shapes)
    return model
