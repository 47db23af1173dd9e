"""From configuration to model: muP's base shapes and roles on `meta`, then one initialisation on CPU."""

from __future__ import annotations

from typing import Optional

import torch

from ipu_lean.config import Config, ModelConfig, derived
from ipu_lean.errors import ConfigError
from ipu_lean.models.gpt import GPT
from ipu_lean.models.spec import GPTSpec
from ipu_lean.mup import (
    BaseShapes,
    attach_infshapes,
    base_shapes_from_pair,
    base_shapes_from_width,
    compute_roles,
    finite_base_shapes,
    shapes_on_meta,
)

# What base and target of a pair must share, since none of it is a width: other values give other tensors.
_ALIKE = ("kind", "positions", "norm", "sandwich", "bias", "tied", "stack")


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
    scaled = {name for name, _ in model.named_parameters() if name.startswith("layers.")}
    model.roles = compute_roles(model, base_shapes, depth_scaled=scaled, depth_mult=derived.depth_mult(config))
    model.base_shapes = base_shapes
    if model.spec.tied:
        name = "embedding.token.weight"
        forward_mult = model.spec.output_mult / model.readout.width_mult
        model.roles[name] = model.roles[name].__class__(
            **{**model.roles[name].as_dict(), "tied": True, "forward_mult": forward_mult}
        )
    attach_infshapes(model, base_shapes)
    return model


def spec_of(config: Config, vocab: Optional[int] = None) -> GPTSpec:
    """The numbers that the configuration resolves to.

    Attention scores are multiplied by sqrt(base head size) / head size: 1 / sqrt(head size) where heads keep their size, and the
    1 / head size of Yang et al. 2021 where they grow with width.
    """
    model, mup, memory = config.model, config.mup, config.memory
    base = derived.base_model(config)
    size = derived.head_size(model)
    base_size = size if base is None else derived.head_size(base)
    return GPTSpec(
        **_structure(model, _rows(config, vocab)),
        dropout=model.dropout,
        attention_dropout=model.attention_dropout,
        embedding_dropout=model.embedding_dropout,
        attention=derived.attention(config),
        base_width=None if base is None else base.width,
        attention_scale=mup.attention_mult * base_size**0.5 / size,
        branch_mult=derived.depth_mult(config),
        embedding_std=mup.embedding_std,
        init_scale=mup.init_scale,
        query_zero_init=derived.query_zero_init(config),
        readout_zero_init=derived.readout_zero_init(config),
        embedding_mult=mup.embedding_mult,
        output_mult=mup.output_mult,
        engine=derived.engine(config),
        checkpoint_every=memory.checkpoint_every,
        loss_chunk=memory.loss_chunk,
    )


def _structure(model: ModelConfig, vocab: int) -> dict:
    """The part of a spec that a model section says alone."""
    return {
        "width": model.width,
        "depth": model.depth,
        "heads": derived.heads(model),
        "ffn_width": derived.ffn_width(model),
        "vocab": vocab,
        "seq": model.seq,
        "positions": model.positions,
        "rotary_base": model.rotary_base,
        "activation": model.activation,
        "norm": model.norm,
        "norm_eps": model.norm_eps,
        "sandwich": model.sandwich,
        "bias": model.bias,
        "tied": model.tied,
        "groups": model.num_hidden_groups,
        "num_inner_groups": model.num_inner_groups,
        "stack": model.stack.kind,
        "coupling": model.stack.coupling,
        "order": model.stack.order,
        "stack_input": model.stack.input,
        "stack_output": model.stack.output,
    }


def _rows(config: Config, vocab: Optional[int]) -> int:
    """Rows of the embedding: `model.vocab`, or else the tokenizer's number."""
    known = derived.tokenizer_vocab(config.data.tokenizer) if vocab is None else vocab
    wanted = config.model.vocab
    if wanted is None:
        return known
    if vocab is not None and wanted < vocab:
        raise ConfigError(
            f"the tokenizer has {vocab} pieces, so the model needs at least that many rows",
            key="model.vocab",
            value=wanted,
            suggestion=f"remove it, or use {vocab} or more",
        )
    return wanted


# Base shapes.


def base_shapes_for(config: Config, vocab: int) -> BaseShapes:
    """Which dimensions grow with width, and from what size. The standard parametrisation: none.

    With `mup.base_width` the model is built there and at twice that width. With `mup.base` the base is that model section, and
    what grows is what grows when its width is doubled; depth and layer groups are the target's, since depth has its own rule.
    """
    model = config.model
    target = _shapes(model, model, vocab)
    if not derived.is_mup(config):
        return finite_base_shapes(target)
    if config.mup.base is not None:
        _check_pair(model, config.mup.base, vocab)
        base = config.mup.base
        delta = derived.at_width(base, 2 * base.width)
        return base_shapes_from_pair(_shapes(base, model, vocab), _shapes(delta, model, vocab), target)
    if model.ffn_width is not None:
        raise ConfigError(
            "a size given as a number does not say how it grows with width, and muP needs to know",
            key="model.ffn_width",
            value=model.ffn_width,
            suggestion=f"write `model.ffn_ratio: {model.ffn_width / model.width:g}`, or give the whole base model as `mup.base`",
        )
    assert config.mup.base_width is not None  # the configuration's own checks have seen to it
    return base_shapes_from_width(
        lambda width: GPT(_shape_spec(derived.at_width(model, width), model, vocab)), config.mup.base_width, model.width
    )


def _shape_spec(model: ModelConfig, target: ModelConfig, vocab: int) -> GPTSpec:
    """A spec with the parameter shapes of `model` at the depth of `target`.

    No parameter's shape depends on the heads, so there is one: widths that the heads do not divide (twice the base) can be built.
    """
    parts = _structure(model, vocab)
    parts.update(heads=1, depth=target.depth, groups=target.num_hidden_groups, num_inner_groups=target.num_inner_groups)
    if parts["positions"] == "rotary":
        parts["positions"] = "none"  # it has no parameters
    return GPTSpec(**parts)


def _shapes(model: ModelConfig, target: ModelConfig, vocab: int) -> dict:
    return shapes_on_meta(lambda: GPT(_shape_spec(model, target, vocab)))


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
    if target.positions == "learned" and base.seq != target.seq:
        raise ConfigError(
            f"learned positions do not grow with width, and the target has {target.seq}", key="mup.base.seq", value=base.seq
        )


def _text(value: object) -> object:
    """A value as the YAML has it."""
    return value.model_dump() if hasattr(value, "model_dump") else value


__all__ = ["base_shapes_for", "build_meta", "build_model", "spec_of"]
