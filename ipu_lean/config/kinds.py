"""What belongs to which kind of model: an option that the other kind would not read is refused, not passed over."""

from __future__ import annotations

from typing import Any, Iterable, Tuple

from ipu_lean.config.model import ModelConfig
from ipu_lean.config.root import Config
from ipu_lean.config.section import Section
from ipu_lean.errors import ConfigError

_MLP_MODEL = ("kind", "width", "depth", "activation", "bias", "dropout", "features")
_MLP_MUP = ("parametrization", "base_width", "base", "depth_rule", "readout_zero_init", "init_scale", "output_mult", "decay")
_MLP_MEMORY = ("engine", "loss_chunk", "fused_update")
_MLP_DATA = ("images", "validation", "cache", "shuffle")


def check_mlp(model: ModelConfig, where: str) -> None:
    """The rules inside the model section of an mlp; `where` is its dotted path."""
    _unread(model, _MLP_MODEL, where)
    if model.activation.endswith("glu"):
        raise ConfigError(
            "an mlp's layers have no gate",
            key=f"{where}.activation",
            value=model.activation,
            suggestion="use `gelu`, `relu` or `silu`",
        )


def check_kind(config: Config) -> None:
    """ConfigError for data of the other kind, and for what only the other kind reads in the other sections."""
    if config.model.kind == "gpt":
        if config.data.images is not None:
            raise ConfigError(
                "a gpt learns text; images are for `model.kind: mlp`",
                key="data.images",
                value=config.data.images,
                suggestion="remove it, or set `model.kind: mlp`",
            )
        return
    if config.data.images is None:
        raise ConfigError(
            "an mlp learns images, and none are named",
            key="data.images",
            suggestion="set `data.images: digits` (or a folder or file of yours), or `model.kind: gpt`",
        )
    _unread(config.data, _MLP_DATA, "data")
    if config.mup.depth_rule == "completep":
        raise ConfigError(
            "an mlp has no residual branches whose multiplier could follow the depth",
            key="mup.depth_rule",
            value="completep",
            suggestion="remove it",
        )
    _unread(config.mup, _MLP_MUP, "mup")
    if config.memory.engine not in ("auto", "store"):
        raise ConfigError(
            "an mlp keeps its few activations", key="memory.engine", value=config.memory.engine, suggestion="remove it"
        )
    _unread(config.memory, _MLP_MEMORY, "memory")
    _unread(config.train.sample, (), "train.sample")
    if config.ipu.embedding_ipu != 0:
        raise ConfigError("an mlp has no embedding", key="ipu.embedding_ipu", value=config.ipu.embedding_ipu)


def _unread(section: Section, read: Iterable[str], where: str) -> None:
    """ConfigError for the first key outside `read` that is not at its default."""
    default = type(section)()
    for name in type(section).model_fields:
        if name in read or getattr(section, name) == getattr(default, name):
            continue
        key, value = _first_difference(getattr(section, name), getattr(default, name), f"{where}.{name}")
        raise ConfigError(_sentence(where, name), key=key, value=value, suggestion="remove it")


def _sentence(where: str, name: str) -> str:
    if where == "train.sample":
        return "an mlp generates no text"
    if where == "memory":
        return "an mlp keeps its few activations"
    if where == "data":
        return f"images have no {name.replace('_', ' ')}"
    return f"an mlp has no {name.replace('_', ' ')}"


def _first_difference(value: Any, default: Any, key: str) -> Tuple[str, Any]:
    """(dotted key, plain value) of the first leaf that differs."""
    if isinstance(value, Section):
        for name in type(value).model_fields:
            if getattr(value, name) != getattr(default, name):
                return _first_difference(getattr(value, name), getattr(default, name), f"{key}.{name}")
    return key, value
