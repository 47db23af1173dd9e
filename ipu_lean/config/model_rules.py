"""The rules inside one model section; muP's base model obeys them too."""

from __future__ import annotations

from ipu_lean.config import derived
from ipu_lean.config.head_rules import check_head_model
from ipu_lean.config.kinds import check_mlp
from ipu_lean.config.model import ModelConfig
from ipu_lean.config.reformer_rules import check_reformer
from ipu_lean.config.stack_rules import check_stack
from ipu_lean.errors import ConfigError


def check_model(model: ModelConfig, where: str) -> None:
    """The rules inside one model section; `where` is its dotted path, for the message."""
    if model.kind == "mlp":
        check_mlp(model, where)
        return
    if model.features is not None:
        raise ConfigError(
            "a gpt reads tokens, which have no features", key=f"{where}.features", value=model.features, suggestion="remove it"
        )
    check_head_model(model, where)
    _heads(model, where)
    if model.ffn_width is None and derived.ffn_width(model) < 1:
        raise ConfigError("ffn_ratio x width rounds to zero", key=f"{where}.ffn_ratio", value=model.ffn_ratio)
    if model.positions == "sinusoidal" and model.width % 2:
        raise ConfigError("sinusoidal positions need an even width", key=f"{where}.width", value=model.width)
    if model.positions not in ("rotary", "sinusoidal") and model.rotary_base != ModelConfig().rotary_base:
        raise ConfigError(
            f"only rotary and sinusoidal positions read this, and the positions are {model.positions}",
            key=f"{where}.rotary_base",
            value=model.rotary_base,
            suggestion="remove it",
        )
    _groups(model, where)
    check_reformer(model, where)
    check_stack(model, where)


def _heads(model: ModelConfig, where: str) -> None:
    width = derived.stack_width(model)
    half = "" if width == model.width else "half of "
    both = model.heads is not None and model.head_size is not None
    if not both and model.head_size is not None and width % model.head_size:
        raise ConfigError(
            f"this must divide {half}{where}.width, which is {width}",
            key=f"{where}.head_size",
            value=model.head_size,
            suggestion=f"use {_divisor(width, model.head_size)}",
        )
    heads = derived.heads(model)
    if not both and width % heads:
        rule = f"this must divide {half}{where}.width, which is {width}"
        if model.heads is None:
            rule = f"unset, this is {half}width // 64 = {heads}, which does not divide {half}{where}.width = {width}"
        raise ConfigError(rule, key=f"{where}.heads", value=model.heads, suggestion=f"use {_divisor(width, heads)}")
    if model.positions == "rotary" and derived.head_size(model) % 2:
        raise ConfigError(
            f"rotary positions turn features in pairs, but a head has {derived.head_size(model)} of them",
            key=f"{where}.head_size" if model.head_size is not None else f"{where}.heads",
            value=model.head_size if model.head_size is not None else model.heads,
            suggestion="choose heads whose size is even, or other positions",
        )


def _divisor(width: int, wanted: int) -> int:
    return min((number for number in range(1, width + 1) if width % number == 0), key=lambda number: abs(number - wanted))


def _groups(model: ModelConfig, where: str) -> None:
    if model.depth % model.num_inner_groups:
        raise ConfigError(
            f"each visit to a group runs this many layers, so it must divide {where}.depth, which is {model.depth}",
            key=f"{where}.num_inner_groups",
            value=model.num_inner_groups,
        )
    if model.num_hidden_groups is not None and model.num_hidden_groups > derived.visits(model):
        raise ConfigError(
            f"there are only {derived.visits(model)} visits (depth / num_inner_groups), so some groups would never run",
            key=f"{where}.num_hidden_groups",
            value=model.num_hidden_groups,
            suggestion=f"use at most {derived.visits(model)}",
        )
