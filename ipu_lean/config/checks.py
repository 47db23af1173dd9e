"""The rules that join keys and sections. Each breach is a ConfigError with its key, its value and a way out."""

from __future__ import annotations

import importlib.util
import re
from typing import Optional

from ipu_lean.config import derived
from ipu_lean.config.head_rules import check_head
from ipu_lean.config.ipu_rules import check_ipu
from ipu_lean.config.kinds import check_kind
from ipu_lean.config.layout import IPU_DEVICES
from ipu_lean.config.memory_rules import check_memory
from ipu_lean.config.model import ModelConfig
from ipu_lean.config.model_rules import check_model
from ipu_lean.config.optimizer import OptimizerConfig
from ipu_lean.config.reformer_rules import check_inner_width, check_levers
from ipu_lean.config.root import Config
from ipu_lean.config.stack_rules import check_inversion
from ipu_lean.errors import ConfigError, EnvironmentProblem

WORKING_PRECISIONS = ("fp32", "bf16-mixed", "fp16-mixed", "bf16-pure")
BETA_LIMIT = 0.996  # beyond it, rounding to nearest keeps a bf16 average from falling
_NAME = re.compile(r"^[A-Za-z0-9_-]+$")


def check(config: Config) -> None:
    """Raises ConfigError for the first rule that does not hold."""
    _precision(config)
    check_model(config.model, "model")
    check_kind(config)
    check_head(config)
    _vocab(config)
    _mup(config)
    check_inner_width(config)
    check_memory(config)
    check_levers(config)
    check_inversion(config)
    _data(config)
    _optimizer(config.optimizer)
    _intervals(config)
    _processes(config)
    _compile(config)
    check_ipu(config)


def require_device(config: Config) -> None:
    """Raises EnvironmentProblem for a device that this machine does not have (`gpu` is checked where torch is loaded)."""
    if config.device == "ipu" and importlib.util.find_spec("poptorch") is None:
        raise EnvironmentProblem(
            "`device: ipu` needs PopTorch, which comes with Graphcore's Poplar SDK (docs/ipu.md) and is not on PyPI. "
            "`device: ipu-emulated` runs the same path here without it, and `device: cpu` mirrors it number by number."
        )


def _precision(config: Config) -> None:
    if config.device in IPU_DEVICES:
        return  # ipu_rules.py knows what an IPU has
    if config.precision == "fp16-ipu":
        raise ConfigError(
            f"this is the IPU's arithmetic, and the device is {config.device}",
            key="precision",
            value=config.precision,
            suggestion="use `fp32`, `bf16-mixed` or `fp16-mixed`, or an IPU device",
        )
    _pure(config)


def _pure(config: Config) -> None:
    """`bf16-pure`, and the optimizer's keys that only it reads."""
    own, default = config.optimizer, OptimizerConfig()
    if config.precision != "bf16-pure":
        for name in ("summation", "variance"):
            if getattr(own, name) != getattr(default, name):
                raise ConfigError(
                    f"only `precision: bf16-pure` reads this, and the precision is {config.precision}",
                    key=f"optimizer.{name}",
                    value=getattr(own, name),
                    suggestion="set `precision: bf16-pure`, or remove it",
                )
        return
    if own.kind != "adamw":
        raise ConfigError(
            "16-bit weights are kept exact by AdamW only",
            key="optimizer.kind",
            value=own.kind,
            suggestion="use `adamw`, or `precision: bf16-mixed`",
        )
    if own.variance == "bf16" and own.betas[1] > BETA_LIMIT:
        raise ConfigError(
            f"a bf16 average cannot fall by a decay of {own.betas[1]:g} a step (at most {BETA_LIMIT} can)",
            key="optimizer.variance",
            value=own.variance,
            suggestion="use `auto` (fp32 here) or `stochastic`",
        )
    if config.train.processes > 1:
        raise ConfigError(
            "processes would average their gradients in 16 bits",
            key="train.processes",
            value=config.train.processes,
            suggestion="use one process, or `precision: bf16-mixed`",
        )


def _vocab(config: Config) -> None:
    tokenizer = config.data.tokenizer
    if tokenizer.kind == "bytes" and tokenizer.vocab not in (None, derived.BYTES_VOCAB):
        raise ConfigError(
            f"a bytes tokenizer always has {derived.BYTES_VOCAB} (256 bytes and end-of-text)",
            key="data.tokenizer.vocab",
            value=tokenizer.vocab,
            suggestion="remove it, or choose `kind: bpe` or `kind: sentencepiece`",
        )
    if tokenizer.kind == "bytes" and tokenizer.path is not None:
        raise ConfigError(
            "a bytes tokenizer is not loaded from anywhere",
            key="data.tokenizer.path",
            value=tokenizer.path,
            suggestion="remove it",
        )
    if tokenizer.kind != "sentencepiece" and tokenizer.coverage != 1.0:
        raise ConfigError("only `kind: sentencepiece` reads this", key="data.tokenizer.coverage", value=tokenizer.coverage)
    if tokenizer.path is not None and tokenizer.coverage != 1.0:
        raise ConfigError(
            "only a tokenizer that is trained here reads this, and one is loaded",
            key="data.tokenizer.coverage",
            value=tokenizer.coverage,
            suggestion="remove it",
        )
    if tokenizer.kind == "bpe" and tokenizer.path is None and derived.tokenizer_vocab(tokenizer) < derived.BYTES_VOCAB:
        raise ConfigError(
            f"byte-level BPE starts from 256 bytes and end-of-text, so it has at least {derived.BYTES_VOCAB} pieces",
            key="data.tokenizer.vocab",
            value=tokenizer.vocab,
        )
    known = derived.least_rows(config) if tokenizer.path is None else None
    if config.model.vocab is not None and known is not None and config.model.vocab < known:
        extra = derived.extra_rows(config.model)
        mask = " and the mask a row of its own" if extra else ""
        raise ConfigError(
            f"the tokenizer has {known - extra} pieces{mask}, so the model needs at least that many rows",
            key="model.vocab",
            value=config.model.vocab,
            suggestion=f"remove it, or use {known} or more",
        )


def _mup(config: Config) -> None:
    mup = config.mup
    if not derived.is_mup(config):
        return
    if mup.base_width is None and mup.base is None:
        raise ConfigError(
            "muP needs a base: the width at which the hyperparameters are meant",
            key="mup.base_width",
            suggestion="set `mup.base_width` (64 or 128 are usual) or `mup.base`, or say `mup.parametrization: standard`",
        )
    if mup.base_width is not None and mup.base is not None:
        raise ConfigError("give `base_width` or `base`, not both", key="mup.base", suggestion="remove one of the two")
    if mup.base is not None:
        check_model(mup.base, "mup.base")
        return
    try:
        check_model(derived.at_width(config.model, mup.base_width or 1), "model")
    except ConfigError as error:
        raise ConfigError(
            f"at this width the model would break a rule: {error.rule}",
            key="mup.base_width",
            value=mup.base_width,
            suggestion=_base_hint(config.model),
        ) from None


def _base_hint(model: ModelConfig) -> Optional[str]:
    if model.heads is not None:
        step = model.heads * (2 if model.positions == "rotary" else 1)
        return f"with `heads: {model.heads}` the base width must be a multiple of {step}"
    if model.head_size is not None:
        return f"with `head_size: {model.head_size}` the base width must be a multiple of it"
    return None


def _data(config: Config) -> None:
    share = 0.0
    for name, source in config.data.validation.items():
        key = f"data.validation.{name}"
        if not _NAME.match(name) or name == "train":
            raise ConfigError("a validation set's name is made of letters, digits, - and _, and is not `train`", key=key)
        if isinstance(source, str):
            if not source:
                raise ConfigError("this names no corpus", key=key, value=source)
            continue
        share += source
        if not 0 < source < 1:
            raise ConfigError(
                "a held-out share lies between 0 and 1", key=key, value=source, suggestion="0.05 holds out a twentieth"
            )
    if share >= 1:
        raise ConfigError(f"the held-out shares add up to {share:g}, which leaves nothing to train on", key="data.validation")


def _optimizer(optimizer: OptimizerConfig) -> None:
    default = OptimizerConfig()
    foreign = ("betas", "eps") if optimizer.kind == "sgd" else ("momentum", "nesterov")
    for name in foreign:
        if getattr(optimizer, name) != getattr(default, name):
            raise ConfigError(
                f"`kind: {optimizer.kind}` has no {name}",
                key=f"optimizer.{name}",
                value=getattr(optimizer, name),
                suggestion="remove it",
            )
    if optimizer.nesterov and not optimizer.momentum:
        raise ConfigError(
            "Nesterov's form needs a momentum", key="optimizer.nesterov", value=True, suggestion="set `optimizer.momentum: 0.9`"
        )


def _intervals(config: Config) -> None:
    iterations = config.batch.device_iterations
    wanted = {
        "train.steps": config.train.steps,
        "train.eval_every": config.train.eval_every,
        "train.save_every": config.train.save_every,
    }
    for key, value in wanted.items():
        if value % iterations:
            rule = f"one device call makes batch.device_iterations = {iterations} updates, so this must be a multiple of it"
            raise ConfigError(rule, key=key, value=value, suggestion=f"use {max(1, round(value / iterations)) * iterations}")
    if config.schedule.warmup > derived.horizon(config):
        raise ConfigError(
            f"the warm-up would not end within the schedule's {derived.horizon(config)} updates "
            f"({'train.steps' if config.schedule.steps is None else 'schedule.steps'})",
            key="schedule.warmup",
            value=config.schedule.warmup,
            suggestion=f"add `schedule.warmup=0`, or a warm-up of at most {derived.horizon(config)}",
        )
    scale = config.train.fp16_scale
    if scale.init < scale.minimum:
        raise ConfigError(
            f"this lies below train.fp16_scale.minimum, which is {scale.minimum:g}",
            key="train.fp16_scale.init",
            value=scale.init,
        )


def _compile(config: Config) -> None:
    """Compiled branches run whole, on devices of torch."""
    if config.train.compile == "none":
        return
    reason = None
    if config.device in IPU_DEVICES:
        reason = "PopTorch compiles the whole step itself"
    elif config.model.kind == "mlp":
        reason = "an mlp has no branches"
    elif derived.strategy(config) == "fsdp":
        reason = "FSDP puts other tensors in the place of weights for each pass"
    for key in ("ffn_chunk", "attention_heads_at_once"):
        if getattr(config.memory, key):
            reason = f"memory.{key} computes branches in pieces, and compiled ones run whole"
    if reason is not None:
        raise ConfigError(reason, key="train.compile", value=config.train.compile, suggestion="use `none`")


def _processes(config: Config) -> None:
    train, replicas = config.train, config.batch.replicas
    if train.strategy == "single" and train.processes > 1:
        raise ConfigError(
            "`strategy: single` runs one process",
            key="train.processes",
            value=train.processes,
            suggestion="use `ddp` or `fsdp`",
        )
    if replicas % train.processes:
        raise ConfigError(
            f"processes share batch.replicas = {replicas} evenly, so this must divide it",
            key="train.processes",
            value=train.processes,
            suggestion=f"set `batch.replicas: {train.processes * max(1, round(replicas / train.processes))}`",
        )
