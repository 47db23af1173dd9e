"""What the configuration of an mlp resolves to, and which of its dimensions grow with width."""

from __future__ import annotations

from typing import Optional

from ipu_lean.config import Config, ModelConfig, derived
from ipu_lean.data import expected_features, expected_vocab
from ipu_lean.errors import ConfigError
from ipu_lean.models.mlp import MLP, MLPSpec
from ipu_lean.mup import BaseShapes, base_shapes_from_pair, base_shapes_from_width, finite_base_shapes, shapes_on_meta

_ALIKE = ("kind", "bias")


def mlp_spec(config: Config, classes: Optional[int] = None) -> MLPSpec:
    """The numbers that the configuration resolves to; `classes` unless given are those of `data.images`."""
    model, mup = config.model, config.mup
    base = derived.base_model(config)
    return MLPSpec(
        features=expected_features(config),
        width=model.width,
        depth=model.depth,
        classes=expected_vocab(config) if classes is None else classes,
        activation=model.activation,
        bias=model.bias,
        dropout=model.dropout,
        base_width=None if base is None else base.width,
        init_scale=mup.init_scale,
        readout_zero_init=derived.readout_zero_init(config),
        output_mult=mup.output_mult,
        loss_chunk=config.memory.loss_chunk,
    )


def mlp_base_shapes(config: Config, spec: MLPSpec) -> BaseShapes:
    """Which dimensions grow with width, and from what size; the images and the classes never do."""

    def shapes(model: ModelConfig) -> dict:
        return shapes_on_meta(lambda: _at(spec, model.width))

    if not derived.is_mup(config):
        return finite_base_shapes(shapes(config.model))
    if config.mup.base is not None:
        base = config.mup.base
        _check_pair(config.model, base, spec.features)
        return base_shapes_from_pair(
            shapes(base), shapes(derived.at_width(base, 2 * base.width)), shapes(config.model)
        )
    assert config.mup.base_width is not None  # the configuration's own checks have seen to it
    return base_shapes_from_width(lambda width: _at(spec, width), config.mup.base_width, config.model.width)


def _at(spec: MLPSpec, width: int) -> MLP:
    return MLP(MLPSpec(spec.features, width, spec.depth, spec.classes, bias=spec.bias))


def _check_pair(target: ModelConfig, base: ModelConfig, features: int) -> None:
    """Base and target differ in width only."""
    for name in _ALIKE:
        if getattr(base, name) != getattr(target, name):
            raise ConfigError(
                f"base and target differ in widths only, and the target has {name}: {getattr(target, name)}",
                key=f"mup.base.{name}",
                value=getattr(base, name),
                suggestion="make them equal",
            )
    if base.features not in (None, features):
        raise ConfigError(
            f"an image does not grow with width, and the target's has {features} features",
            key="mup.base.features",
            value=base.features,
        )
