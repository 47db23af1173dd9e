"""The lines at the start of a run: what differs from the defaults, versions, size, batch and schedule."""

from __future__ import annotations

import platform
from typing import Any, Dict, Iterator, List, Tuple

import torch
from torch import nn

import ipu_lean
from ipu_lean.config import Config, ModelConfig, derived, layer_kinds
from ipu_lean.train.engines.parallel import strategy_name
from ipu_lean.train.world import World


def flat(config: Config) -> Dict[str, Any]:
    """Every value by dotted key."""
    return dict(_leaves(config.model_dump(mode="json"), ""))


def _leaves(value: Any, path: str) -> Iterator[Tuple[str, Any]]:
    # Free mappings (data.validation), muP's base model, a sweep and a study count as one value.
    if isinstance(value, dict) and path not in ("data.validation", "mup.base", "sweep", "study"):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    else:
        yield path, value


def non_defaults(config: Config) -> Dict[str, Any]:
    """The values that differ from the schema's defaults."""
    default = flat(Config())
    return {key: value for key, value in flat(config).items() if value != default.get(key)}


def count_parameters(model: nn.Module) -> int:
    """Trained numbers; tied and shared tensors count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def versions() -> Dict[str, str]:
    """What the numbers of a run may depend on."""
    return {"ipu_lean": ipu_lean.__version__, "python": platform.python_version(), "torch": str(torch.__version__)}


def banner(config: Config, model: nn.Module, vocab: int, world: World) -> List[str]:
    """The lines themselves."""
    batch, model_config = config.batch, config.model
    changed = "  ".join(f"{key}={value}" for key, value in non_defaults(config).items())
    used = "  ".join(f"{name} {number}" for name, number in versions().items())
    threads = "" if world.device.type == "cuda" else f", {torch.get_num_threads()} threads each"
    tokens = batch.global_batch * derived.labels_per_row(model_config)
    lr, schedule = config.optimizer.lr, config.schedule
    last = lr if schedule.kind == "constant" else lr * schedule.final
    processes = "1 process" if world.size == 1 else f"{world.size} processes ({strategy_name(config, world)})"
    return [
        f"versions: {used}",
        f"config (what differs from defaults): {changed or 'nothing'}",
        f"device: {config.device}, {config.precision}, seed {config.seed}, {processes}{threads}",
        f"model: {count_parameters(model):,} parameters (tied ones counted once), {_network(config, vocab)}, "
        f"{config.mup.parametrization} parametrisation",
        f"batch: {batch.micro} micro x {batch.accumulation} accumulation x {batch.replicas} replicas = {batch.global_batch} "
        + _rows(model_config, tokens)
        + (f", {batch.device_iterations} updates per device call" if batch.device_iterations > 1 else ""),
        f"schedule: {schedule.kind}, {schedule.warmup} warm-up, {derived.horizon(config)} updates, lr {lr:.3g} -> {last:.3g}; "
        f"{config.train.steps} updates in all",
    ]


def _rows(model: ModelConfig, tokens: int) -> str:
    """What the rows of a batch are."""
    if model.kind == "mlp":
        return "images per update"
    if model.head == "classifier":
        return f"texts of up to {model.seq} tokens per update"
    return f"rows x {model.seq} tokens = {tokens:,} per update"


def _network(config: Config, vocab: int) -> str:
    """The network in a few words."""
    model = config.model
    if model.kind == "mlp":
        return f"{model.depth} hidden layers, width {model.width}, {model.activation}, {vocab:,} classes"
    head = "" if model.head == "causal-lm" else f", {model.head}"
    kinds = list(dict.fromkeys(layer_kinds.kinds(model)))
    named = " and ".join(part for part in (", ".join(kinds[:-1]), kinds[-1]) if part)
    attention = "" if kinds == ["full"] else f" of {named} attention"
    return (
        f"{model.depth} layers, width {model.width}, {derived.heads(model)} heads{attention}, vocabulary {vocab:,}, "
        f"{model.stack.kind} stack{head}, memory engine {derived.engine(config)}"
    )
