"""From the `ipu:` and `batch:` sections to `poptorch.Options`, for training and for inference.

One object owns both, since mixing them up changes shapes without an error: training divides a batch by the accumulation too.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch

from ipu_lean.config import Config, derived
from ipu_lean.config.layout import eval_device_iterations, layout, stages, stochastic_rounding

_RECOMPUTE_ALL = 4  # popart::RecomputationType, which PopTorch takes as a number
_GENERATIONS = {"ipu1": 1, "ipu2": 2, "ipu21": 21}


class OptionPair(NamedTuple):
    """Options of the training and of the inference model."""

    train: Any
    eval: Any


def make_options(config: Config, poptorch: Any, fresh: Optional[Callable[[], Any]] = None, replicas: int = 0) -> OptionPair:
    """The options that the configuration asks for; torch's random state is left as it was (`randomSeed` seeds it too).

    Args:
        poptorch: the module from `load_poptorch`.
        fresh: makes empty options; PopDist's (`ipu/dist.py`) instead of `poptorch.Options` when several hosts train together.
        replicas: those of this process; 0 for all of batch.replicas. PopDist's options bring their own number.
    """
    fresh = fresh or poptorch.Options
    with torch.random.fork_rng(devices=[]):
        train, inference = fresh(), fresh()
        if fresh is poptorch.Options:
            train.replicationFactor(replicas or config.batch.replicas)
            inference.replicationFactor(replicas or config.batch.replicas)
        _training(train, config, poptorch)
        _inference(inference, config, poptorch)
    return OptionPair(train, inference)


def _training(options: Any, config: Config, poptorch: Any) -> None:
    _common(options, config, poptorch)
    options.deviceIterations(config.batch.device_iterations)
    options.Training.gradientAccumulation(config.batch.accumulation)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Mean)
    options.Precision.enableStochasticRounding(stochastic_rounding(config))
    if config.ipu.loss_scaling == "auto":
        options.Training.setAutomaticLossScaling(True)
    if config.ipu.recompute_checkpoint_every_layer and stages(config) == 1 and not derived.surrogate(config):
        # A pipeline recomputes by itself; one IPU, and IPUs one after another, keep everything unless told (Compiler.cpp:573). A
        # surrogate has nothing to recompute, and PopART would run its whole walk again.
        options._Popart.set("autoRecomputation", _RECOMPUTE_ALL)
    if config.ipu.optimizer_state_offchip or config.ipu.replicated_tensor_sharding:
        location = poptorch.TensorLocationSettings()
        location.useOnChipStorage(not config.ipu.optimizer_state_offchip)
        location.useReplicatedTensorSharding(config.ipu.replicated_tensor_sharding)
        options.TensorLocations.setOptimizerLocation(location)


def _inference(options: Any, config: Config, poptorch: Any) -> None:
    _common(options, config, poptorch)
    options.deviceIterations(eval_device_iterations(config))
    options.Precision.enableStochasticRounding(False)


def _common(options: Any, config: Config, poptorch: Any) -> None:
    # Every micro-batch's loss and sums come back: a few bytes each, and the host can tell updates apart.
    options.outputMode(poptorch.OutputMode.All)
    options.randomSeed(config.seed)
    # AutoIncrement, so that the path may come back to an IPU, as it does to the embedding's for a tied readout.
    if config.ipu.execution == "sharded":
        options.setExecutionStrategy(poptorch.ShardedExecution(poptorch.AutoStage.AutoIncrement))
    else:
        options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
    options.Precision.setPartialsType(torch.float16 if config.ipu.partials == "half" else torch.float32)
    options.showCompilationProgressBar(False)
    shares = memory_proportions(config)
    if shares:
        options.setAvailableMemoryProportion(shares)
    if config.ipu.executable_cache is not None:
        options.enableExecutableCaching(config.ipu.executable_cache)
    if config.ipu.synthetic_data:
        options.enableSyntheticData(True)
    if config.ipu.offline_target is not None:
        options.useOfflineIpuTarget(_GENERATIONS[config.ipu.offline_target])
    if config.ipu.engine_options:
        options._Popart.setEngineOptions(dict(config.ipu.engine_options))


def memory_proportions(config: Config) -> Dict[str, float]:
    """`{"IPU0": 0.2, …}`; empty for PopTorch's default."""
    given = config.ipu.matmul_proportion
    if given is None:
        return {}
    count = layout(config).ipus
    return {f"IPU{ipu}": share for ipu, share in enumerate(given if isinstance(given, list) else [given] * count)}


def describe_options(pair: OptionPair) -> str:
    """Both sets of options as text, for the run directory: `train.device_iterations = 2`, one line each."""
    lines: List[str] = []
    for name, options in zip(pair._fields, pair):
        values = options.toDict()
        lines += [f"{name}.{key} = {values[key]!r}" for key in sorted(values)]
    return "\n".join(lines) + "\n"
