"""`poptorch.Options` (python/options.py:1146-1914). Setters return the options; all freeze with their first use."""
from __future__ import annotations

import copy
import json
import os
from typing import Any, Dict, List, Optional

import torch

from . import enums
from .locations import TensorLocationSettings, _TensorLocationOptions
from .option_groups import _DistributedOptions, _JitOptions, _PopartOptions, _PrecisionOptions, _TrainingOptions
from .optionsdict import OptionsDict
from .strategies import PipelinedExecution, ShardedExecution, _IExecutionStrategy


class ConfigFileError(Exception):
    """A line of an options file is not a call of an option."""


class Options(OptionsDict):
    """Everything about a run that is not the model: batching, placement, precision, the device."""

    def __init__(self) -> None:
        popart = _PopartOptions()
        super().__init__(
            replication_factor=1, input_group_size=1, input_cgt=enums.CommGroupType.Consecutive, broadcast_buffers=True,
            device_iterations=1, log_dir=".", max_repeat_logs=4, auto_round_num_ipus=False, anchored_tensors={},
            output_mode=enums.OutputMode.Default.value, output_return_period=1,
            connection_type=enums.ConnectionType.Always.value, sync_pattern=enums.SyncPattern.Full.value,
            available_memory_proportion={})
        self.__dict__.update(
            _popart=popart, _training=_TrainingOptions(popart), _precision=_PrecisionOptions(popart), _jit=_JitOptions(),
            _distributed=_DistributedOptions(), _tensor_locations=_TensorLocationOptions(),
            _execution_strategy=PipelinedExecution(), _relax_optimizer_checks=False, _show_compilation_progress_bar=True,
            _module_namescope_enabled=True, _source_location_excludes=["site-packages/torch", "site-packages/poptorch"])
        cache = os.environ.get("POPTORCH_CACHE_DIR", "")
        if cache:
            self.enableExecutableCaching(cache)
        self.from_json(os.environ.get("POPTORCH_DEFAULT_OPTIONS", "{}"))

    @property
    def TensorLocations(self) -> _TensorLocationOptions:
        return self._tensor_locations

    @property
    def Distributed(self) -> _DistributedOptions:
        return self._distributed

    @property
    def Jit(self) -> _JitOptions:
        return self._jit

    @property
    def Precision(self) -> _PrecisionOptions:
        return self._precision

    @property
    def Training(self) -> _TrainingOptions:
        return self._training

    @property
    def _Popart(self) -> _PopartOptions:
        return self._popart

    # -- from text -------------------------------------------------------------------------------------------------------
    def from_json(self, string: str) -> Options:
        """`{"deviceIterations": 2, "outputMode": "OutputMode.All", "_Popart.set": ["key", 1]}`; a list is spread."""
        for path, value in json.loads(string).items():
            target: Any = self
            for name in path.split("."):
                target = getattr(target, name)
            arguments = value if isinstance(value, list) else [value]
            target(*[_enum_from_text(item) for item in arguments])
        return self

    def loadFromFile(self, filepath: str) -> Options:
        """One call a line, without the `options.` prefix; blank lines and `#` comments are skipped. ConfigFileError."""
        with open(filepath, encoding="utf-8") as file:
            lines = file.read().splitlines()
        names = {"poptorch": _Names(), "torch": torch, "TensorLocationSettings": TensorLocationSettings}
        names.update({name: value for name, value in vars(enums).items() if isinstance(value, type)})
        for number, line in enumerate(lines, 1):
            text = line.strip()
            if not text or text.startswith("#"):
                continue
            try:
                eval(f"options.{text}", {"__builtins__": {}}, dict(names, options=self))
            except Exception as error:
                raise ConfigFileError(f"{filepath}:{number}: {text!r} is not an option: {error}") from error
        return self

    # -- logging and debugging -------------------------------------------------------------------------------------------
    def sourceLocationExcludes(self, excludes: List[str]) -> Options:
        self._source_location_excludes = excludes
        return self

    def appendToLocationExcludes(self, *excludes: str) -> Options:
        self._source_location_excludes = [*self._source_location_excludes, *excludes]
        return self

    def showCompilationProgressBar(self, show: bool = True) -> Options:
        self._show_compilation_progress_bar = show
        return self

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Options:
        """True: unexpected optimizer attributes are debug messages, not warnings."""
        self._relax_optimizer_checks = relax
        return self

    def logDir(self, log_dir: str) -> Options:
        self.set(log_dir=log_dir)
        return self

    def maxRepeatLogs(self, max_lines: Optional[int]) -> Options:
        """Repeats of one message that are still shown; None shows all."""
        self.checkIsFrozen()
        self._values["max_repeat_logs"] = 0 if max_lines is None else max_lines
        return self

    def modelName(self, name: str) -> Options:
        self.createOrSet(model_name=name)
        return self

    def logCycleCount(self, log_cycle_count: bool) -> Options:
        self._popart.set("instrumentWithHardwareCycleCounter", log_cycle_count)
        return self

    def enableProfiling(self, profile_dir: Optional[str] = None) -> Options:
        self.createOrSet(profiling_dir=profile_dir or ".")
        return self

    def disableModuleNamescope(self) -> Options:
        self._module_namescope_enabled = False
        return self

    # -- batching and placement ------------------------------------------------------------------------------------------
    def deviceIterations(self, device_iterations: int) -> Options:
        self.set(device_iterations=device_iterations)
        return self

    def replicationFactor(self, replication_factor: int) -> Options:
        self.set(replication_factor=replication_factor)
        return self

    def inputReplicaGrouping(self, input_group_size: int, input_group_type: enums.CommGroupType) -> Options:
        """ValueError: type All, a group larger than the replicas, or one that does not divide them (:1474-1506)."""
        replicas = self.replication_factor
        if input_group_type == enums.CommGroupType.All:
            raise ValueError("inputReplicaGrouping does not take CommGroupType.All")
        if input_group_size > replicas or replicas % input_group_size:
            raise ValueError(f"input_group_size {input_group_size} must divide replicationFactor {replicas}")
        self.set(input_group_size=input_group_size, input_cgt=input_group_type)
        return self

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Options:
        self.set(broadcast_buffers=broadcast_buffers)
        return self

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Options:
        self.set(auto_round_num_ipus=auto_round_num_ipus)
        return self

    def setExecutionStrategy(self, strategy: Any) -> Options:
        """A PipelinedExecution, ShardedExecution, ParallelPhasedExecution or SerialPhasedExecution; AssertionError."""
        assert isinstance(strategy, _IExecutionStrategy), f"{strategy!r} is not an execution strategy"
        self._execution_strategy = strategy
        return self

    def setAvailableMemoryProportion(self, available_memory_proportion: Dict[str, float]) -> Options:
        """`{"IPU0": 0.2}`; keys start with IPU, AssertionError otherwise."""
        result = {}
        for key, value in available_memory_proportion.items():
            assert key.startswith("IPU") and key[3:].isdigit(), f"expected a key such as IPU0, got {key!r}"
            result[int(key[3:])] = value
        self.createOrSet(available_memory_proportion=result)
        return self

    def outputMode(self, output_mode: enums.OutputMode, output_return_period: Optional[int] = None) -> Options:
        """Which micro-batches' outputs come back; EveryN needs a positive period, AssertionError otherwise."""
        assert isinstance(output_mode, enums.OutputMode), f"{output_mode!r} is not a poptorch.OutputMode"
        period = 1
        if output_mode == enums.OutputMode.EveryN:
            assert output_return_period and output_return_period > 0, "EveryN requires output_return_period > 0"
            period = output_return_period
        self.set(output_mode=output_mode.value, output_return_period=period)
        return self

    def defaultOutputMode(self) -> bool:
        return self.output_mode == enums.OutputMode.Default

    def anchorTensor(self, short_name: str, long_name: str, output_mode: Optional[enums.OutputMode] = None,
                     output_return_period: Optional[int] = 1) -> None:
        """Have a tensor of the graph returned to the host, read with `executor.getAnchoredTensor(short_name)`."""
        follow = output_mode is None
        mode = enums.OutputMode.Final if follow else output_mode
        self.checkIsFrozen()
        self.anchored_tensors[short_name] = [long_name, follow, mode, output_return_period]

    # -- device ----------------------------------------------------------------------------------------------------------
    def enableExecutableCaching(self, path: str) -> Options:
        if path is None:
            self._popart.options.pop("enableEngineCaching", None)
            self._popart.set("enableEngineCaching", False)
        else:
            self._popart.set("cachePath", path).set("enableEngineCaching", True)
        return self

    def useIpuModel(self, use_model: bool) -> Options:
        self.createOrSet(use_model=use_model)
        return self

    def connectionType(self, connection_type: enums.ConnectionType) -> Options:
        assert isinstance(connection_type, enums.ConnectionType), f"{connection_type!r} is not a poptorch.ConnectionType"
        self.set(connection_type=connection_type.value)
        return self

    def syncPattern(self, sync_pattern: enums.SyncPattern) -> Options:
        assert isinstance(sync_pattern, enums.SyncPattern), f"{sync_pattern!r} is not a poptorch.SyncPattern"
        self.set(sync_pattern=sync_pattern.value)
        return self

    def useIpuId(self, ipu_id: int) -> Options:
        assert isinstance(ipu_id, int), "ipu_id must be an int"
        self.createOrSet(ipu_id=ipu_id)
        return self

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Options:
        """Compile for an IPU that is not there (version 1, 2 or 21); the model can then not be run."""
        self.connectionType(enums.ConnectionType.Never)
        self.createOrSet(ipu_version=ipu_version)
        return self

    def randomSeed(self, random_seed: int) -> Options:
        """Seed of the device; torch's generator on the host is seeded with it as well (:1740)."""
        assert isinstance(random_seed, int), f"randomSeed takes an int, got {type(random_seed)}"
        torch.manual_seed(random_seed)
        self.createOrSet(random_seed=random_seed)
        return self

    def enableStableNorm(self, enabled: bool) -> Options:
        self._popart.set("enableStableNorm", enabled)
        return self

    def enableSyntheticData(self, enabled: bool) -> Options:
        """True: inputs are random normal numbers made on the device and the host's are ignored."""
        self._popart.set("syntheticDataMode", 2 if enabled else 0)
        return self

    def updatableNamedBuffers(self, buffers: List[str]) -> Options:
        self._popart.set("updatableNamedBuffers", buffers)
        return self

    # -- whole -----------------------------------------------------------------------------------------------------------
    def toDict(self) -> Dict[str, Any]:
        """All groups in one dictionary, as the compiler takes it; AssertionError on colliding keys."""
        whole = super().toDict()
        for group in (self._training, self._precision, self._jit, self._distributed, self._tensor_locations):
            group.update(whole)
        whole.update(self._execution_strategy.backendOptions())
        whole.update(self._popart.options)
        assert whole["output_mode"] != enums.OutputMode.EveryN or whole["output_return_period"] > 0
        return whole

    def clone(self) -> Options:
        """An equal copy that is not frozen."""
        return copy.deepcopy(self)


class _Names:
    """`poptorch.X` inside an options file."""

    def __getattr__(self, name: str) -> Any:
        for value in (TensorLocationSettings, PipelinedExecution, ShardedExecution):
            if value.__name__ == name:
                return value
        return getattr(enums, name)


def _enum_from_text(value: Any) -> Any:
    """`"OutputMode.All"` -> the member; anything else as it is."""
    if isinstance(value, str) and value.count(".") == 1:
        kind, member = value.split(".")
        return getattr(getattr(enums, kind, None), member, value)
    return value
