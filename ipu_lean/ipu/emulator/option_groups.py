"""The groups under `poptorch.Options`: Training, Precision, Jit, Distributed, _Popart (python/options.py:57-512)."""
from __future__ import annotations

import copy
import os
from typing import Any, Dict, List, Set, Union

import torch

from . import enums
from .log import logger
from .optionsdict import FROZEN, OptionsDict


class _PopartOptions:
    """PopART session options by name; enums as integers. Nothing checks the names until the session is built."""

    def __init__(self) -> None:
        self._is_frozen = False
        self.options: Dict[str, Any] = {"instrumentWithHardwareCycleCounter": False, "rearrangeAnchorsOnHost": False}

    def __deepcopy__(self, memory: Dict[int, Any]) -> _PopartOptions:
        twin = _PopartOptions()
        memory[id(self)] = twin
        twin.options = copy.deepcopy(self.options, memory)
        return twin

    def checkIsFrozen(self, option: Any = None) -> None:
        if self._is_frozen:
            raise AttributeError(FROZEN)

    def set(self, key: str, value: Union[int, float, str, List[str], Set[str]]) -> _PopartOptions:
        self.checkIsFrozen()
        self.options[key] = value
        return self

    def setEngineOptions(self, engine_options: Dict[str, str]) -> _PopartOptions:
        return self.set("engineOptions", engine_options)

    def setPatterns(self, patterns: Dict[str, bool], level: int = 2) -> _PopartOptions:
        assert isinstance(level, int), "level must be an int"
        assert isinstance(patterns, dict), "patterns must be a dict of names and bools"
        return self.set("patterns_level", level).set("patterns", patterns)


class _JitOptions(OptionsDict):
    """What is left of the old tracer's options."""

    def traceModel(self, trace_model: bool) -> _JitOptions:
        """Deprecated; True is a ValueError (python/options.py:57-68)."""
        logger.warning("options.Jit.traceModel is deprecated: the dispatcher is the only tracer")
        if trace_model:
            raise ValueError("options.Jit.traceModel(True) is no longer supported")
        return self


class _PrecisionOptions(OptionsDict):
    """Numerical options."""

    def __init__(self, popart_options: _PopartOptions) -> None:
        super().__init__()
        self.__dict__["_popart_options"] = popart_options

    def halfFloatCasting(self, half_float_casting: enums.HalfFloatCastingBehavior) -> _PrecisionOptions:
        logger.warning("options.Precision.halfFloatCasting is deprecated and does nothing")
        return self

    def runningStatisticsAlwaysFloat(self, value: bool) -> _PrecisionOptions:
        if not isinstance(value, bool):
            raise ValueError("runningStatisticsAlwaysFloat takes a bool")
        logger.warning("options.Precision.runningStatisticsAlwaysFloat is deprecated and does nothing")
        return self

    def enableFloatingPointExceptions(self, enabled: bool) -> _PrecisionOptions:
        assert isinstance(enabled, bool), "enableFloatingPointExceptions takes a bool"
        self._popart_options.set("enableFloatingPointChecks", enabled)
        return self

    def enableStochasticRounding(self, enabled: bool) -> _PrecisionOptions:
        self._popart_options.set("enableStochasticRounding", enabled)
        return self

    def setPartialsType(self, dtype: torch.dtype) -> _PrecisionOptions:
        """Type of partial sums in matrix products and convolutions: torch.float or torch.half, ValueError otherwise.

        Replaces the whole `convolutionOptions` entry, which setConvolutionDithering also replaces: the last call wins.
        """
        if dtype not in (torch.float32, torch.float16):
            raise ValueError(f"setPartialsType takes torch.float or torch.half, not {dtype}")
        name = "float" if dtype == torch.float32 else "half"
        self._popart_options.set("partialsTypeMatMuls", name)
        self._popart_options.set("convolutionOptions", {"partialsType": name})
        return self


class _TrainingOptions(OptionsDict):
    """Options that only a training model may set."""

    def __init__(self, popart_options: _PopartOptions) -> None:
        super().__init__(gradient_accumulation=1, accumulation_and_replication_reduction_type=enums.ReductionType.Mean,
                         meanAccumulationAndReplicationReductionStrategy=enums.MeanReductionStrategy.Post)
        self.__dict__["_popart_options"] = popart_options

    def gradientAccumulation(self, gradient_accumulation: int) -> _TrainingOptions:
        self.set(gradient_accumulation=gradient_accumulation)
        return self

    def accumulationAndReplicationReductionType(self, reduction_type: enums.ReductionType) -> _TrainingOptions:
        allowed = (enums.ReductionType.Mean, enums.ReductionType.Sum)
        if not isinstance(reduction_type, enums.ReductionType) or reduction_type not in allowed:
            raise ValueError("accumulationAndReplicationReductionType takes poptorch.ReductionType.Mean or .Sum")
        self.set(accumulation_and_replication_reduction_type=reduction_type)
        return self

    def setMeanAccumulationAndReplicationReductionStrategy(self, mean_reduction_strategy: enums.MeanReductionStrategy
                                                           ) -> _TrainingOptions:
        self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)
        return self

    def setAutomaticLossScaling(self, enabled: bool) -> _TrainingOptions:
        self._popart_options.set("automaticLossScalingSettings.enabled", enabled)
        return self

    def setConvolutionDithering(self, enabled: bool) -> _TrainingOptions:
        self._popart_options.set("convolutionOptions", {"enableConvDithering": enabled})
        return self


class _DistributedOptions(OptionsDict):
    """This process's place among the processes of one run; read from the launcher's environment at construction."""

    def __init__(self) -> None:
        super().__init__(num_distributed_processes=1, distributed_process_id=0, ipuof_configs={})
        self.setEnvVarNames("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")

    def disable(self) -> _DistributedOptions:
        return self.configureProcessId(0, 1)

    def setEnvVarNames(self, var_num_processes: str, var_process_id: str) -> _DistributedOptions:
        return self.configureProcessId(int(os.environ.get(var_process_id, "0")),
                                       int(os.environ.get(var_num_processes, "1")))

    def configureProcessId(self, process_id: int, num_processes: int) -> _DistributedOptions:
        self.set(distributed_process_id=process_id, num_distributed_processes=num_processes)
        return self

    @property
    def processId(self) -> int:
        return self.distributed_process_id

    @property
    def numProcesses(self) -> int:
        return self.num_distributed_processes
