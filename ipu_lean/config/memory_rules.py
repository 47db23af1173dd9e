"""What cannot hold of the `memory:` section, numbers included."""

from __future__ import annotations

from typing import Any

from ipu_lean.config.fused_rules import check_fused
from ipu_lean.config.root import Config
from ipu_lean.errors import ConfigError

LEVERS = ("ffn_chunk", "attention_heads_at_once", "keep_last", "segments")


def check_memory(config: Config) -> None:
    """Raises ConfigError for the first rule that does not hold. (ipu_rules.py knows what an IPU has.)"""
    memory = config.memory
    _invertible(config, memory.engine, "memory.engine")
    if memory.checkpoint_every != 1 and memory.engine != "checkpoint":
        raise ConfigError(
            f"only `engine: checkpoint` reads this, and the engine is {memory.engine}",
            key="memory.checkpoint_every",
            value=memory.checkpoint_every,
            suggestion="set `memory.engine: checkpoint`, or remove it",
        )
    _keep_last(config)
    if memory.segments is not None:
        _segments(config)
    check_fused(config)


def refuse_levers(config: Config) -> None:
    """Raises ConfigError if one of the levers is set on an IPU: they work in Python's backward pass, which PopTorch ignores."""
    for name in LEVERS:
        value = getattr(config.memory, name)
        if value:
            raise ConfigError(
                "this is done in Python's backward code, which PopTorch ignores, so it would save nothing",
                key=f"memory.{name}",
                value=_plain(value),
                suggestion="remove it: `memory.ipu_backward` and ipu.recompute_checkpoint_every_layer save memory there",
            )


def _invertible(config: Config, engine: str, key: str) -> None:
    if engine == "invert" and config.model.stack.kind == "residual":
        raise ConfigError(
            "only a reversible stack can be inverted",
            key=key,
            value=engine,
            suggestion="use `store` or `checkpoint`, or `model.stack.kind: reversible`",
        )


def _keep_last(config: Config) -> None:
    memory, model = config.memory, config.model
    if not memory.keep_last:
        return
    engine = memory.engine
    if engine == "store" or (engine == "auto" and model.stack.kind == "residual"):
        raise ConfigError(
            "the engine is `store`, which keeps all layers",
            key="memory.keep_last",
            value=memory.keep_last,
            suggestion="remove it, or choose another `memory.engine`",
        )
    if memory.keep_last > model.depth:
        raise ConfigError(f"the stack has {model.depth} layers", key="memory.keep_last", value=memory.keep_last)
    _whole_blocks(config, memory.keep_last, "memory.keep_last")


def _segments(config: Config) -> None:
    memory, depth = config.memory, config.model.depth
    for name, default in (("engine", "auto"), ("checkpoint_every", 1), ("keep_last", 0)):
        if getattr(memory, name) != default:
            raise ConfigError(
                "`memory.segments` says this for each of its parts",
                key=f"memory.{name}",
                value=getattr(memory, name),
                suggestion="remove one of the two",
            )
    for place, part in enumerate(memory.segments or ()):
        key = f"memory.segments.{place}"
        _invertible(config, part.engine, f"{key}.engine")
        _whole_blocks(config, part.layers, f"{key}.layers")
        if part.checkpoint_every != 1 and part.engine != "checkpoint":
            raise ConfigError(
                f"only `engine: checkpoint` reads this, and the engine is {part.engine}",
                key=f"{key}.checkpoint_every",
                value=part.checkpoint_every,
                suggestion="remove it",
            )
    total = sum(part.layers for part in memory.segments or ())
    if total != depth:
        raise ConfigError(
            f"the segments have {total} layers, and model.depth is {depth}",
            key="memory.segments",
            value=_plain(memory.segments),
            suggestion="their layers add up to the depth",
        )


def _whole_blocks(config: Config, layers: int, key: str) -> None:
    if config.model.stack.order == "aaff" and layers % 2:
        raise ConfigError(
            "order aaff joins two layers in a block, so this is even", key=key, value=layers, suggestion=f"use {layers + 1}"
        )


def _plain(value: Any) -> Any:
    """As the YAML has it."""
    return [part.model_dump() for part in value] if isinstance(value, list) else value
