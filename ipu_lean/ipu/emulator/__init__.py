"""PopTorch 3.4's public API on plain PyTorch CPU: accepts and refuses what PopTorch does, and trains as it trains.

`import ipu_lean.ipu.emulator as poptorch`. A model's `forward` is called once, on shape-only tensors; each op is checked against
PopTorch's table; the traced graph is then replayed with real tensors. Gradients are those of the traced ops: a Python backward
(`autograd.Function`, checkpointing, hooks) has no effect. Weights live on an emulated device, apart from the host's. float16 is
rounded after each op, stochastically on request.

Beyond PopTorch: `examine.examine` (all that is wrong with a step), `verify.gradient_gaps` (traced gradients beside Python's own),
`kept.kept_for_backward` (bytes that a training step keeps for its backward pass), `machine.set_machine` (how many IPUs there are;
by default one attached executor holds them all).
Refused because they are not emulated: saved executables, custom and host ops in a trace, weights that differ between replicas,
several processes. Accepted and not reproduced: memory and time, the order in which argsort leaves equal keys. Loops are unrolled.
"""
from __future__ import annotations

from . import optim
from .blocks import BeginBlock, Block, BlockFunction, LegacyBeginBlockFn, removeBlocks
from .contexts import Attribute, MultiConv, NameScope
from .dataloader import DataLoader
from .enums import (
    AutoStage,
    CommGroupType,
    ConnectionType,
    DataLoaderMode,
    HalfFloatCastingBehavior,
    Liveness,
    MatMulSerializationMode,
    MeanReductionStrategy,
    MultiConvPlanType,
    OutputMode,
    OverlapMode,
    ReductionType,
    SharingStrategy,
    SyncPattern,
    VariableRetrievalMode,
)
from .errors import Error, RecoverableError, UnrecoverableError, createPoptorchError
from .executor import PoplarExecutor
from .locations import TensorLocationSettings
from .log import setLogLevel
from .machine import ipuHardwareIsAvailable, ipuHardwareVersion
from .ops import (
    CPU,
    cond,
    custom_op,
    dynamic_slice,
    dynamic_update,
    for_loop,
    identity_loss,
    ipu_print_tensor,
    nop,
    recomputationCheckpoint,
    serializedMatMul,
    set_available_memory,
    set_overlap_for_input,
    set_overlap_for_output,
)
from .options import ConfigFileError, Options
from .prefetch import AsynchronousDataAccessor
from .strategies import ParallelPhasedExecution, Phase, PipelinedExecution, SerialPhasedExecution, ShardedExecution, Stage
from .tracestate import isRunningOnIpu
from .wrappers import __version__, inferenceModel, load, registerPostCompileHook, registerPreCompileHook, trainingModel

__all__ = [
    "AsynchronousDataAccessor", "Attribute", "AutoStage", "BeginBlock", "Block", "BlockFunction", "CPU", "CommGroupType",
    "ConfigFileError", "ConnectionType", "DataLoader", "DataLoaderMode", "Error", "HalfFloatCastingBehavior",
    "LegacyBeginBlockFn", "Liveness", "MatMulSerializationMode", "MeanReductionStrategy", "MultiConv", "MultiConvPlanType",
    "NameScope", "Options", "OutputMode", "OverlapMode", "ParallelPhasedExecution", "Phase", "PipelinedExecution",
    "PoplarExecutor", "RecoverableError", "ReductionType", "SerialPhasedExecution", "ShardedExecution", "SharingStrategy",
    "Stage", "SyncPattern", "TensorLocationSettings", "UnrecoverableError", "VariableRetrievalMode", "__version__", "cond",
    "createPoptorchError", "custom_op", "dynamic_slice", "dynamic_update", "for_loop", "identity_loss", "inferenceModel",
    "ipuHardwareIsAvailable", "ipuHardwareVersion", "ipu_print_tensor", "isRunningOnIpu", "load", "nop", "optim",
    "recomputationCheckpoint", "registerPostCompileHook", "registerPreCompileHook", "removeBlocks", "serializedMatMul",
    "setLogLevel", "set_available_memory", "set_overlap_for_input", "set_overlap_for_output", "trainingModel",
]
