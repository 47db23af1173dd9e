"""muP's base shapes of a GPT: which dimensions grow with width, and from what size."""

from __future__ import annotations

from typing import Tuple

from ipu_lean.config import Config, ModelConfig, derived, layer_kinds
from ipu_lean.errors import ConfigError
from ipu_lean.models.classifier import make_gpt
from ipu_lean.models.resolve import structure, with_classes
from ipu_lean.models.spec import GPTSpec
from ipu_lean.mup import BaseShapes, base_shapes_from_pair, base_shapes_from_width, finite_base_shapes, shapes_on_meta

# What base and target of a pair must share, since none of it is a width: other values give other tensors.
_ALIKE = (
    "kind", "head", "pooling", "positions", "norm", "sandwich", "bias", "attention_bias", "tied", "readout_bias", "causal",
    "stack",
)  # fmt: skip


def base_shapes_for(config: Config, vocab: int) -> BaseShapes:
    """Which dimensions grow with width, and from what size. The standard parametrisation: none.

    With `mup.base_width` the model is built there and at twice that width. With `mup.base` the base is that model section, and
    what grows is what grows when its width is doubled; depth and layer groups are the target's, since depth has its own rule.
    """
    model = with_classes(config)
    if not derived.is_mup(config):
        return finite_base_shapes(_shapes(model, model, vocab))
    if config.mup.base is not None:
        _check_pair(model, config.mup.base, vocab)
        base = config.mup.base
        delta = derived.at_width(base, 2 * base.width)
        if base.heads is not None and base.head_size is not None:
            delta = delta.model_copy(update={"heads": 2 * base.heads})  # together they are a width of their own
        return base_shapes_from_pair(_shapes(base, model, vocab), _shapes(delta, model, vocab), _shapes(model, model, vocab))
    if model.ffn_width is not None:
        raise ConfigError(
            "a size given as a number does not say how it grows with width, and muP needs to know",
            key="model.ffn_width",
            value=model.ffn_width,
            suggestion=f"write `model.ffn_ratio: {model.ffn_width / model.width:g}`, or give the whole base model as `mup.base`",
        )
    assert config.mup.base_width is not None  # the configuration's own checks have seen to it
    return base_shapes_from_width(
        lambda width: make_gpt(_shape_spec(derived.at_width(model, width), model, vocab)), config.mup.base_width, model.width
    )


def _shape_spec(model: ModelConfig, target: ModelConfig, vocab: int) -> GPTSpec:
    """A spec with the parameter shapes of `model` at the depth of `target`.

    No parameter's shape depends on the heads, only on what they have together, so there is one: widths that the heads do not
    divide (twice the base) can be built.
    """
    both = model.heads is not None and model.head_size is not None
    parts = structure(model, vocab)
    parts.update(heads=1, features_per_head=derived.attention_width(model) if both else None, kinds=_kinds(target, target))
    parts.update(classes=target.classes or 0)
    parts.update(depth=target.depth, groups=target.num_hidden_groups, num_inner_groups=target.num_inner_groups)
    if parts["positions"] == "rotary":
        parts["positions"] = "none"  # it has no parameters
    return GPTSpec(**parts)


def _shapes(model: ModelConfig, target: ModelConfig, vocab: int) -> dict:
    return shapes_on_meta(lambda: make_gpt(_shape_spec(model, target, vocab)))


def _check_pair(target: ModelConfig, base: ModelConfig, vocab: int) -> None:
    """Base and target differ in widths only."""
    for name in _ALIKE:
        if getattr(base, name) != getattr(target, name):
            raise ConfigError(
                f"base and target differ in widths only, and the target has {name}: {_text(getattr(target, name))}",
                key=f"mup.base.{name}",
                value=_text(getattr(base, name)),
                suggestion="make them equal",
            )
    if _kinds(base, target) != _kinds(target, target):
        raise ConfigError(
            f"hashed attention has other matrices, and the target's layers are {', '.join(_kinds(target, target))}",
            key="mup.base.attention",
            value=_text(base.attention),
            suggestion="make them equal",
        )
    gated = [name.activation.endswith("glu") for name in (base, target)]
    if gated[0] != gated[1]:
        raise ConfigError(
            f"a gated feed-forward has one more matrix than another, and the target's is {target.activation}",
            key="mup.base.activation",
            value=base.activation,
        )
    if base.vocab is not None and base.vocab != vocab:
        raise ConfigError(
            f"the vocabulary does not grow with width, and the target has {vocab}", key="mup.base.vocab", value=base.vocab
        )
    if target.positions == "axial" and layer_kinds.axial_shape(base) != layer_kinds.axial_shape(target):
        raise ConfigError(
            f"the grid of positions does not grow with width, and the target's is {list(layer_kinds.axial_shape(target))}",
            key="mup.base.axial.shape",
            value=list(layer_kinds.axial_shape(base)),
            suggestion="make it equal, or both `seq`",
        )
    if target.positions == "learned" and base.seq != target.seq:
        raise ConfigError(
            f"learned positions do not grow with width, and the target has {target.seq}", key="mup.base.seq", value=base.seq
        )


def _kinds(model: ModelConfig, target: ModelConfig) -> Tuple[str, ...]:
    """The kinds of attention that `model` says, for the layers of `target`."""
    names = ("depth", "num_hidden_groups", "num_inner_groups")
    return layer_kinds.distinct_kinds(model.model_copy(update={name: getattr(target, name) for name in names}))


def _text(value: object) -> object:
    """A value as the YAML has it."""
    return value.model_dump() if hasattr(value, "model_dump") else value
