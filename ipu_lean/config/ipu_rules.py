"""What PopTorch and PopART would refuse, or accept without doing it, checked before the device sees it (numbers included)."""

from __future__ import annotations

from typing import Dict, List, Tuple

from ipu_lean.config import derived
from ipu_lean.config.layout import IPU_DEVICES, Layout, accumulator, eval_device_iterations, is_half, layout, stages
from ipu_lean.config.memory_rules import refuse_levers
from ipu_lean.config.root import Config
from ipu_lean.errors import ConfigError

IPU_PRECISIONS = ("fp32", "fp16-ipu")


def check_ipu(config: Config) -> None:
    """Raises ConfigError. The layers have to add up on every device; the rest holds where there are IPUs."""
    found = layout(config)
    if config.device not in IPU_DEVICES:
        return
    _precision(config)
    _memory(config)
    _processes(config)
    check_placement(config)
    _surrogate(config)
    _pipeline(config, found)
    _optimizer(config)
    _device(config, found)


def check_placement(config: Config) -> None:
    """Raises ConfigError where a layer, the embedding or the readout cannot stand where `ipu` puts it, whatever the device."""
    found = layout(config)
    _placement(config, found)
    _shared(config, found)


def _precision(config: Config) -> None:
    if config.precision not in IPU_PRECISIONS:
        bf16 = config.precision.startswith("bf16")
        raise ConfigError(
            "an IPU has no bf16" if bf16 else "PopTorch ignores autocast, so nothing would be mixed",
            key="precision",
            value=config.precision,
            suggestion="use `fp16-ipu` (fp16 weights, loss scaling, stochastic rounding) or `fp32`",
        )
    if is_half(config) and config.device == "ipu-emulated" and not config.ipu.emulate_precision:
        raise ConfigError(
            "the emulator rounds as an IPU does only on request, because that is slow",
            key="precision",
            value=config.precision,
            suggestion="set `ipu.emulate_precision: true`, or `precision: fp32`",
        )


def _memory(config: Config) -> None:
    if config.memory.engine in ("invert", "checkpoint"):
        raise ConfigError(
            "PopTorch takes gradients of the traced forward pass and ignores Python's backward code, so this would save nothing",
            key="memory.engine",
            value=config.memory.engine,
            suggestion="use `auto`: PopART recomputes, and ipu.recompute_checkpoint_every_layer says how much; to keep no "
            "activations at all there is `memory.ipu_backward: surrogate`",
        )
    refuse_levers(config)
    if config.model.attention == "fused":
        raise ConfigError(
            "PopTorch has no fused attention", key="model.attention", value="fused", suggestion="use `auto` or `explicit`"
        )


def _processes(config: Config) -> None:
    if config.train.processes > 1 or config.train.strategy in ("ddp", "fsdp"):
        raise ConfigError(
            "one process drives all IPUs of a host, and replicas live on the device",
            key="train.processes" if config.train.processes > 1 else "train.strategy",
            value=config.train.processes if config.train.processes > 1 else config.train.strategy,
            suggestion="set `batch.replicas`; several hosts are launched with poprun (docs/ipu.md)",
        )


def _placement(config: Config, found: Layout) -> None:
    if derived.tied(config.model) and found.head != found.embedding:
        raise ConfigError(
            f"the readout shares the embedding's matrix, which lives on IPU {found.embedding}; a weight cannot be on two IPUs",
            key="ipu.head_ipu",
            value=found.head,
            suggestion=f"use {found.embedding}, or `model.tied: false`",
        )
    used = {found.head, *found.layer_ipus}
    if config.model.kind == "gpt":
        used.add(found.embedding)  # an mlp begins with its first layer
    idle = [ipu for ipu in range(max(found.ipus, len(found.layers))) if ipu not in used]
    if idle:
        raise ConfigError(
            f"IPU {idle[0]} would hold nothing, and it is reserved all the same",
            key="ipu.layers_per_ipu",
            value=list(found.layers),
            suggestion="number the IPUs without gaps",
        )
    proportions = config.ipu.matmul_proportion
    if isinstance(proportions, list) and len(proportions) != found.ipus:
        raise ConfigError(
            f"there are {len(proportions)} shares for {_counted(found.ipus, 'IPU')}",
            key="ipu.matmul_proportion",
            value=proportions,
            suggestion="give one for each IPU of a replica, or a single number",
        )


def _shared(config: Config, found: Layout) -> None:
    """A layer that is run several times, or a block of two layers, stands on one IPU."""
    model, ipus = config.model, found.layer_ipus
    inner = model.num_inner_groups
    homes: Dict[Tuple[int, int], int] = {}
    for place, ipu in enumerate(ipus):
        key = (derived.group_of_visit(model, place // inner), place % inner)
        if homes.setdefault(key, ipu) != ipu:
            raise ConfigError(
                f"layer {place} shares its weights with a layer on IPU {homes[key]}; a weight cannot be on two IPUs",
                key="ipu.layers_per_ipu",
                value=list(found.layers),
                suggestion="keep all visits of a shared group on one IPU (model.num_hidden_groups)",
            )
    if model.stack.order == "aaff":
        for place in range(0, len(ipus) - 1, 2):
            if ipus[place] != ipus[place + 1]:
                raise ConfigError(
                    f"order aaff joins layers {place} and {place + 1} in one block, which stands on one IPU",
                    key="ipu.layers_per_ipu",
                    value=list(found.layers),
                    suggestion="place an even number of layers on each IPU",
                )


def _surrogate(config: Config) -> None:
    """A backward pass inside the forward pass: what it needs."""
    if not derived.surrogate(config):
        return
    key, back = "memory.ipu_backward", "use `recompute`"
    if config.model.stack.kind != "reversible":
        raise ConfigError(
            "a residual stack cannot be walked backwards: its inputs do not follow from its outputs",
            key=key,
            value="surrogate",
            suggestion=f"{back}, or `model.stack.kind: reversible`",
        )
    forward = stages(config)
    if forward > 1:
        raise ConfigError(
            f"the walk back would visit the pipeline's IPUs again, {2 * forward - 1} forward stages in place of {forward}, and "
            "PopART would keep activations for each",
            key=key,
            value="surrogate",
            suggestion=f"{back}, one IPU a replica (no `ipu.layers_per_ipu`), or `ipu.execution: sharded`",
        )
    if config.ipu.loss_scaling == "auto":
        raise ConfigError(
            "the scale multiplies gradients inside the step, where PopART cannot adapt it",
            key="ipu.loss_scaling",
            value="auto",
            suggestion=f"give a number, or {back[4:]} as `{key}`",
        )


def _pipeline(config: Config, found: Layout) -> None:
    forward = stages(config)
    if forward == 1:
        return
    route = "-".join(str(ipu) for ipu in found.path)
    wanted = 2 * forward - 1
    if config.batch.accumulation < wanted:
        raise ConfigError(
            f"the micro-batches visit IPUs {route}, which are F = {forward} forward stages, and a training pipeline needs "
            f"2F-1 = {wanted} micro-batches in flight",
            key="batch.accumulation",
            value=config.batch.accumulation,
            suggestion=f"use {wanted} or more, fewer IPUs, or `ipu.execution: sharded`",
        )
    iterations = eval_device_iterations(config)
    if iterations < forward:
        raise ConfigError(
            f"the micro-batches visit IPUs {route}, and evaluation needs as many device iterations as stages, F = {forward}",
            key="ipu.eval_device_iterations",
            value=iterations,
            suggestion=f"use {forward} or more, or leave it out",
        )


def _optimizer(config: Config) -> None:
    own, ipu, half = config.optimizer, config.ipu, accumulator(config) == "half"
    if ipu.loss_scaling == "auto" and not half:
        raise ConfigError(
            "automatic loss scaling watches fp16 gradients, and the accumulators are float32",
            key="ipu.loss_scaling",
            value="auto",
            suggestion="set `ipu.accumulator: half` (and `precision: fp16-ipu`), or a number",
        )
    if ipu.loss_scaling == "auto" and not is_half(config):
        raise ConfigError(
            f"automatic loss scaling is for fp16, and the precision is {config.precision}",
            key="ipu.loss_scaling",
            value="auto",
            suggestion="set `precision: fp16-ipu`, or leave it out",
        )
    if own.kind == "adam" and own.weight_decay and config.train.clip is not None:
        raise ConfigError(
            "PopART adds Adam's decay to the gradient before it clips, other devices after, so the numbers would differ",
            key="train.clip",
            value=config.train.clip,
            suggestion="use `optimizer.kind: adamw`, `optimizer.weight_decay: 0` or `train.clip: null`",
        )


def _counted(count: int, what: str) -> str:
    """`1 IPU`, `2 IPUs`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def _device(config: Config, found: Layout) -> None:
    replicas = config.batch.replicas
    total = found.ipus * replicas
    if total & (total - 1):
        uneven = bool(found.ipus & (found.ipus - 1))
        raise ConfigError(
            f"{_counted(found.ipus, 'IPU')} a replica x {_counted(replicas, 'replica')} = {total} IPUs, which must be "
            "a power of two",
            key="ipu.layers_per_ipu" if uneven else "batch.replicas",
            value=list(found.layers) if uneven else config.batch.replicas,
            suggestion=f"make it {_powers(total)}",
        )
    if config.ipu.replicated_tensor_sharding and config.batch.replicas == 1:
        raise ConfigError(
            "there is one replica, so there is nothing to spread the optimizer's state over",
            key="ipu.replicated_tensor_sharding",
            value=True,
            suggestion="raise `batch.replicas`, or use `ipu.optimizer_state_offchip`",
        )


def _powers(total: int) -> str:
    powers: List[int] = [1]
    while powers[-1] * 2 <= total:
        powers.append(powers[-1] * 2)
    return f"{powers[-1]} or {powers[-1] * 2}"
