"""What a head needs and what only one of them reads: a flag that contradicts another is named, not passed over."""

from __future__ import annotations

from ipu_lean.config.data import DataConfig
from ipu_lean.config.model import ModelConfig
from ipu_lean.config.root import Config
from ipu_lean.config.train import SampleConfig
from ipu_lean.errors import ConfigError


def check_head_model(model: ModelConfig, where: str) -> None:
    """The rules inside one model section; `where` is its dotted path."""
    key = f"{where}.causal"
    if model.head == "causal-lm" and not model.causal:
        raise ConfigError(
            "`head: causal-lm` predicts the next token, and would see it",
            key=key,
            value=False,
            suggestion="set `causal: true`, or `head: masked-lm`",
        )
    if model.head == "masked-lm" and model.causal:
        raise ConfigError(
            "`head: masked-lm` guesses hidden tokens from both sides, and would see only what stands before them",
            key=key,
            value=True,
            suggestion="set `causal: false`, or `head: causal-lm`",
        )
    if model.head == "classifier" and model.causal and model.pooling == "first":
        raise ConfigError(
            "`pooling: first` reads the first token, which would see no other",
            key=key,
            value=True,
            suggestion="set `causal: false`, or `pooling: mean`",
        )
    if model.head == "classifier":
        if model.readout_bias:
            raise ConfigError(
                "a classifier's head has biases if `bias` is true",
                key=f"{where}.readout_bias",
                value=True,
                suggestion="remove it",
            )
        return
    default = ModelConfig()
    for name in ("classes", "pooling"):
        if getattr(model, name) != getattr(default, name):
            raise _only("model.head: classifier", f"{where}.{name}", getattr(model, name))


def check_head(config: Config) -> None:
    """The rules that join a gpt's head with the other sections."""
    head, data, default = config.model.head, config.data, DataConfig()
    if config.model.kind != "gpt":
        return
    if head != "causal-lm" and data.shift:
        raise _only("model.head: causal-lm", "data.shift", True)
    if head != "masked-lm" and data.mask_share != default.mask_share:
        raise _only("model.head: masked-lm", "data.mask_share", data.mask_share)
    if head == "classifier":
        _labelled(config)
    else:
        for name in ("labelled", "label_key"):
            if getattr(data, name) != getattr(default, name):
                raise _only("model.head: classifier", f"data.{name}", getattr(data, name))
    sample = config.train.sample
    if head != "causal-lm" and sample.tokens and sample != SampleConfig():
        changed = next(name for name in type(sample).model_fields if getattr(sample, name) != getattr(SampleConfig(), name))
        raise ConfigError(
            f"a {head} generates no text",
            key=f"train.sample.{changed}",
            value=getattr(sample, changed),
            suggestion="remove it",
        )


def _labelled(config: Config) -> None:
    """A classifier reads labelled texts, and not a running one."""
    data, default = config.data, DataConfig()
    if data.labelled is None:
        raise ConfigError(
            "a classifier learns from labelled texts, and none are named",
            key="data.labelled",
            suggestion="set `data.labelled: FILE.jsonl` (or .csv), or `docs-or-code`, which needs no file",
        )
    for name in ("corpus", "limit"):
        if getattr(data, name) != getattr(default, name):
            raise ConfigError(
                "a classifier reads `data.labelled` instead",
                key=f"data.{name}",
                value=getattr(data, name),
                suggestion="remove it",
            )


def _only(reader: str, key: str, value: object) -> ConfigError:
    return ConfigError(f"only `{reader}` reads this", key=key, value=value, suggestion="remove it")
