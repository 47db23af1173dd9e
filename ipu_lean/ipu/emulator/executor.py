"""`poptorch.PoplarExecutor`: what trainingModel and inferenceModel return (python/_poplar_executor.py)."""
from __future__ import annotations

import datetime
import time
from collections import OrderedDict
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import nn

from . import enums, machine, optim, optimconvert, rng, wrapping
from .anchors import names as anchor_names
from .args import ArgsParser, Arguments, micro_batch
from .checks import ipu_count, rounded
from .devicestate import DeviceState
from .errors import createPoptorchError
from .executable import Executable
from .latency import Latencies
from .log import logger
from .options import Options
from .outputs import Outputs
from .structures import flatten, rebuild
from .trace import Trace, refuse, trace

_before: OrderedDict[int, Callable[[], None]] = OrderedDict()
_after: OrderedDict[int, Callable[[], None]] = OrderedDict()


class PoplarExecutor(DeviceState, Latencies):
    """Runs a model as if on IPUs. Make it with `trainingModel` or `inferenceModel`.

    The model's own parameters stay on the host; the device has copies. A training call makes the host's copies out of date; they
    are copied back when something reads them.
    """

    def __init__(self, model: nn.Module, options: Optional[Options], training: bool, poptorch_version: str,
                 optimizer: Optional[torch.optim.Optimizer] = None, user_model: Optional[nn.Module] = None) -> None:
        self._user_model = user_model if user_model is not None else model
        self._model = model
        self._training = training
        self._poptorch_version = poptorch_version
        self._options = _own_options(options, training)
        self._executable: Optional[Executable] = None
        self._trace: Optional[Trace] = None
        self._compiled_for: Optional[Arguments] = None
        self._is_attached = False
        self._dirty_host_weights = False
        self._host_weights_version = 0
        self._names: Dict[int, str] = {}
        self._remembered: Dict[str, Tuple[torch.Tensor, torch.Tensor]] = {}
        self._optimizer: Optional[torch.optim.Optimizer] = None
        self._converted: Optional[optimconvert.Converted] = None
        self._anchors: Dict[str, torch.Tensor] = {}
        self._times: List[Tuple[float, float, float, float]] = []
        self._compilation_time: Optional[datetime.timedelta] = None
        self._rng = rng.DeviceRandom(self._options.random_seed if self._options.exists("random_seed") else None)
        self.per_replica_params: Dict[str, Any] = {}
        self._args_parser = ArgsParser(model)
        if training:
            self._tracker = optimconvert.AttributeTracker(self._options)
            self.setOptimizer(optimizer if optimizer is not None else optim.SGD(self._user_model.parameters(), lr=0.01))
        else:
            assert not optimizer, "Optimizer should be None for inference"
        self._options._freeze()
        if training:
            wrapping.wrap(self._user_model, self)

    # -- access ----------------------------------------------------------------------------------------------------------
    @property
    def model(self) -> nn.Module:
        """The wrapped model."""
        return self._user_model

    @property
    def options(self) -> Options:
        """A frozen copy of the options."""
        return self._options

    @property
    def rng_state(self) -> List[int]:
        """`[seed, *state]` of the device's random numbers; Error before compilation."""
        self._require_compiled()
        return self._rng.state()

    @rng_state.setter
    def rng_state(self, state: List[int]) -> None:
        self._require_compiled()
        self._rng.set_state(state)

    def __getattr__(self, attr: str) -> Any:
        if attr.startswith("__") or "_user_model" not in self.__dict__:
            raise AttributeError(attr)
        value = getattr(self._user_model, attr)
        return _ReplicaGrouping(self, attr, value) if isinstance(value, nn.Parameter) else value

    def __repr__(self) -> str:
        return repr(self._user_model)

    def getTensorNames(self) -> List[str]:
        """Names that `Options.anchorTensor` can ask for; AssertionError before compilation."""
        assert self._executable is not None, "Model must be compiled before calling getTensorNames"
        traced = self._executable.trace
        return anchor_names(self._executable.trainable, [*traced.parameters, *traced.buffers])

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        assert short_name in self._anchors, f"No tensor with name {short_name} found."
        return self._anchors[short_name]

    # -- compilation -----------------------------------------------------------------------------------------------------
    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Trace and compile for arguments of these shapes; a second call only warns."""
        parsed = self._args_parser(args, kwargs)
        if self._executable is not None:
            logger.warning("Call to compile() ignored: the executable is already compiled")
            return
        self._compile(parsed)

    def _compile(self, given: Arguments) -> None:
        start = time.time()
        if self.per_replica_params:
            raise createPoptorchError(f"replicaGrouping of weights is not emulated: {sorted(self.per_replica_params)}")
        if self._options.Distributed.numProcesses > 1:
            raise createPoptorchError(f"Options.Distributed has {self._options.Distributed.numProcesses} processes: the emulator "
                                      "does not exchange gradients between them. Use replicationFactor in one process")
        for tensor in given.tensors():
            if tensor.requires_grad:
                logger.warning("Input tensor has requires_grad=True set; it is detached")
        micro = given.map(lambda tensor: micro_batch(tensor.detach(), self._options))
        host = self._host()
        self._sync_user_model()
        hooks = (list(_before.values()), list(_after.values()))
        traced = trace(self._model, micro.args, micro.kwargs, self._options, self._training, hooks)
        refuse(traced.violations)
        self._check_updatable({node.meta["name"] for node in traced.live if node.meta.get("kind") == "buffer"})
        for message, where in traced.notes:
            logger.warning("%s (%s)" if where.file else "%s%.0s", message, where)
        groups = self._groups() if self._training else []
        self._trace, self._compiled_for = traced, given.map(lambda tensor: torch.empty_like(tensor, device="meta"))
        executable = Executable(traced, self._options, self._training, host, self._converted, groups)
        executable.anchors()
        ipus = ipu_count(traced.live, self._options)
        self._ipus = rounded(ipus) if self._options.auto_round_num_ipus else ipus
        if self._options.connection_type != enums.ConnectionType.Never:
            machine.acquire(self, self._ipus)
            self._is_attached = True
        self._executable = executable
        self._compilation_time = datetime.timedelta(seconds=time.time() - start)
        if self._is_attached:
            self._on_attach()

    def compilationTime(self) -> datetime.timedelta:
        if self._compilation_time is None:
            raise createPoptorchError("Please compile the model before obtaining compilation time.")
        if not self._options._show_compilation_progress_bar:
            raise createPoptorchError("Please set showCompilationProgressBar option to obtain compilation time.")
        return self._compilation_time

    # -- running ---------------------------------------------------------------------------------------------------------
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compile if need be, attach if detached, run all device iterations, return the outputs that the options keep."""
        assert self._options.connection_type != enums.ConnectionType.Never, (
            "Trying to run a model on an offline device (ConnectionType.Never): use model.compile(inputs), not model(inputs)")
        given = self._args_parser(args, kwargs, not self.isCompiled())
        if self._executable is None:
            self._compile(given)
        if not self._is_attached:
            self.attachToDevice()
        if not self._training:
            self._follow_training_weights()
        self._compiled_for.match(given)  # type: ignore[union-attr]
        self._warn_of_edits()
        self._write_optimizer_state()
        result = self._run([tensor.detach() for tensor in given.tensors()])
        if self._training:
            self._dirty_host_weights = True
            if isinstance(self._optimizer, optim.Optimizer):
                self._optimizer.host_state_is_dirty = True
        return result

    def _run(self, inputs: List[torch.Tensor]) -> Any:
        executable, options = self._executable, self._options
        assert executable is not None and self._trace is not None
        times = [time.perf_counter()]
        inputs = [tensor.float() if tensor.dtype == torch.float64 else tensor for tensor in inputs]
        if options._popart.options.get("syntheticDataMode"):
            inputs = [torch.randn_like(tensor) if tensor.is_floating_point() else torch.zeros_like(tensor) for tensor in inputs]
        times.append(time.perf_counter())
        constant = [bool(node.meta.get("constant")) for node in executable.outputs]
        kept = Outputs(options.output_mode, options.output_return_period, executable.plan.replicas,
                       executable.plan.iterations * executable.plan.accumulation, constant)
        anchors = executable.anchors()
        with self._rng:
            executable.run(inputs, kept, anchors)
        self._anchors = anchors.result()
        times.append(time.perf_counter())
        made = iter(kept.result())
        values = [next(made) if node is not None else tensor
                  for node, tensor in zip(self._trace.outputs, flatten(self._trace.structure))]
        for value in values:
            value.backward = _no_backward
        times.append(time.perf_counter())
        self._times = [(times[0], times[1], times[2], times[3])]
        return rebuild(self._trace.structure, iter(values))

    def cycleCount(self) -> int:
        raise createPoptorchError("cycleCount() needs IPU hardware" if self._options._Popart.options.get(
            "instrumentWithHardwareCycleCounter") else "Cycle count logging is disabled: set Options.logCycleCount(True)")

    def save(self, filename: str, export_model: bool = True, save_rng_state: bool = True) -> None:
        raise createPoptorchError("executables cannot be saved: the emulator has none")

    def loadExecutable(self, filename: str) -> None:
        raise createPoptorchError("executables cannot be loaded: the emulator has none")

    def compileAndExport(self, filename: str, *args: Any, export_model: bool = True, **kwargs: Any) -> None:
        self.compile(*args, **kwargs)
        self.save(filename, export_model)


def _own_options(options: Optional[Options], training: bool) -> Options:
    """A private copy of the options; the user's are frozen. Error: not Options, or accumulation in inference (:184-225)."""
    if options is not None and not isinstance(options, Options):
        raise createPoptorchError(f"Invalid type: 'options' is of type {type(options)} (Expected poptorch.Options)")
    if options is not None:
        options._freeze()
    own = options.clone() if options is not None else Options()
    if own.defaultOutputMode():
        own.outputMode(enums.OutputMode.Final if training else enums.OutputMode.All)
    if not training and own.Training.gradient_accumulation != 1:
        raise createPoptorchError("Training.gradientAccumulation must be 1 in a poptorch.inferenceModel(), it is "
                                  f"{own.Training.gradient_accumulation}; use deviceIterations to feed a pipeline")
    return own


def _no_backward(*args: Any, **kwargs: Any) -> None:
    raise createPoptorchError("backward() cannot be called on outputs of a PopTorch model: a trainingModel does the backward "
                              "pass and the update itself")


class _ReplicaGrouping:
    """A parameter read through the executor: the parameter's attributes, and `replicaGrouping`."""

    def __init__(self, executor: PoplarExecutor, name: str, parameter: nn.Parameter) -> None:
        self.__dict__.update(_executor=executor, _name=name, _parameter=parameter)

    def replicaGrouping(self, comm_group_type: enums.CommGroupType, shards: int,
                        variable_retrieval_mode: enums.VariableRetrievalMode) -> None:
        self._executor.per_replica_params[self._name] = (comm_group_type, shards, variable_retrieval_mode)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parameter, name)
