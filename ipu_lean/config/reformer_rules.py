"""The rules of hashed and local attention, of axial positions, and of what goes with them."""

from __future__ import annotations

from typing import Any, Optional

from ipu_lean.config import derived, layer_kinds
from ipu_lean.config.model import ModelConfig
from ipu_lean.config.reformer import AxialConfig, LocalConfig, LSHConfig
from ipu_lean.config.root import Config
from ipu_lean.config.section import Section
from ipu_lean.errors import ConfigError


def check_reformer(model: ModelConfig, where: str) -> None:
    """The rules inside one model section; `where` is its dotted path."""
    _list(model, where)
    for kind, default in (("lsh", LSHConfig()), ("local", LocalConfig())):
        if not layer_kinds.uses(model, kind):
            _unread(getattr(model, kind), default, f"no layer has `attention: {kind}`", f"{where}.{kind}")
    if layer_kinds.uses(model, "lsh"):
        _lsh(model, where)
    _axial(model, where)
    if model.readout_bias and model.tied:
        raise ConfigError(
            "a tied readout is the embedding, which has no bias",
            key=f"{where}.readout_bias",
            value=True,
            suggestion=f"set `{where}.tied: false`, or remove it",
        )


def check_inner_width(config: Config) -> None:
    """Heads and their size given together fix the attention's inner width; muP has to know how it grows."""
    model = config.model
    if model.kind != "gpt" or not derived.is_mup(config) or model.heads is None or model.head_size is None:
        return
    inner, base = derived.attention_width(model), config.mup.base
    if base is None:
        raise ConfigError(
            f"`heads` and `head_size` together fix what is inside the attention at {inner} features, whatever the width is, and "
            "under muP it grows with the width",
            key="model.head_size",
            value=model.head_size,
            suggestion="remove one of the two, give a whole base model as `mup.base`, or use `mup.parametrization: standard`",
        )
    if derived.attention_width(base) * model.width != inner * base.width:
        raise ConfigError(
            f"the attention is {inner} features wide inside at width {model.width}, so at the base's {base.width} it has to be "
            f"{inner * base.width / model.width:g}, and it is {derived.attention_width(base)}",
            key="mup.base.heads",
            value=base.heads,
            suggestion="let heads x head_size grow with the width, or use `mup.parametrization: standard`",
        )


def check_levers(config: Config) -> None:
    """What the other sections ask of attention and only full attention can do."""
    kind = next((kind for kind in ("lsh", "local") if layer_kinds.uses(config.model, kind)), None)
    if kind is None:
        return
    if kind == "lsh" and config.train.compile != "none":
        raise ConfigError(
            "compiled branches run whole, and hashed attention has to keep its buckets for the backward pass",
            key="train.compile",
            value=config.train.compile,
            suggestion="use `none`",
        )
    if config.memory.attention_heads_at_once:
        raise ConfigError(
            f"only full attention is computed in groups of heads, and some layers have `attention: {kind}`, which holds only the "
            "scores of neighbouring chunks",
            key="memory.attention_heads_at_once",
            value=config.memory.attention_heads_at_once,
            suggestion="remove it",
        )


def _list(model: ModelConfig, where: str) -> None:
    asked, own = model.attention, layer_kinds.distinct_layers(model)
    if not isinstance(asked, list) or own % len(asked) == 0:
        return
    which = f"{where}.depth" if model.num_hidden_groups is None else "the number of layers with weights of their own"
    raise ConfigError(
        f"a list of kinds is repeated over the layers, so its length divides {which}, which is {own}",
        key=f"{where}.attention",
        value=list(asked),
        suggestion=f"give {own} kinds, or as many as divide {own}",
    )


def _lsh(model: ModelConfig, where: str) -> None:
    lsh = model.lsh
    if lsh.full_below is not None and lsh.full_below < lsh.chunk:
        raise ConfigError(
            f"a sequence of up to one chunk ({lsh.chunk} tokens) gets full attention anyway",
            key=f"{where}.lsh.full_below",
            value=lsh.full_below,
            suggestion=f"use {lsh.chunk} or more, or remove it",
        )


def _axial(model: ModelConfig, where: str) -> None:
    if model.positions != "axial":
        _unread(model.axial, AxialConfig(), f"the positions are {model.positions}", f"{where}.axial", "set `positions: axial`")
        return
    rows, columns = layer_kinds.axial_shape(model)
    if rows * columns < model.seq:
        raise ConfigError(
            f"a grid of {rows} x {columns} has {rows * columns} positions, and {where}.seq is {model.seq}",
            key=f"{where}.axial.shape",
            value=[rows, columns],
            suggestion=f"use [{-(-model.seq // columns)}, {columns}], or leave it out",
        )
    first, second = layer_kinds.axial_dims(model)
    if first + second != model.width or second < 1:
        raise ConfigError(
            f"the two vectors stand side by side, so their sizes add up to {where}.width, which is {model.width}",
            key=f"{where}.axial.dims",
            value=[first, second],
            suggestion=f"use [{first}, {model.width - first}]" if first < model.width else "leave it out",
        )


def _unread(section: Section, default: Section, why: str, where: str, cure: Optional[str] = None) -> None:
    """ConfigError for the first key of a section that nobody reads and that is not at its default."""
    for name in type(section).model_fields:
        value: Any = getattr(section, name)
        if value != getattr(default, name):
            suggestion = "remove it" if cure is None else f"{cure}, or remove it"
            raise ConfigError(f"nobody reads this: {why}", key=f"{where}.{name}", value=value, suggestion=suggestion)
