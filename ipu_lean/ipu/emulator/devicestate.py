"""The part of an executor that moves weights, optimizer state and IPUs between host and device
(python/_poplar_executor.py:458-672, 1482-1592)."""
from __future__ import annotations

from types import MethodType
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

import torch
from torch import nn

from . import enums, machine, optim, optimconvert, wrapping
from .errors import createPoptorchError
from .executable import Executable
from .log import logger
from .options import Options

NOT_COMPILED = "Model has not been compiled or has been destroyed."


class DeviceState:
    """Dirty flags and copies. `_model` is the shallow copy that is traced; it shares its tensors with `_user_model`."""

    _model: nn.Module
    _user_model: nn.Module
    _options: Options
    _training: bool
    _executable: Optional[Executable]
    _optimizer: Optional[torch.optim.Optimizer]
    _converted: Optional[optimconvert.Converted]
    _tracker: optimconvert.AttributeTracker
    _is_attached: bool
    _dirty_host_weights: bool
    _host_weights_version: int
    _ipus: int
    _names: Dict[int, str]
    _remembered: Dict[str, Tuple[torch.Tensor, torch.Tensor]]

    def isCompiled(self) -> bool:
        return self._executable is not None

    def isAttachedToDevice(self) -> bool:
        return self.isCompiled() and self._is_attached

    # -- weights ---------------------------------------------------------------------------------------------------------
    def _host(self) -> Dict[str, torch.Tensor]:
        """The host's parameters and buffers by name; the caller sees to it that reading them is no news."""
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    def _require_compiled(self) -> Executable:
        if self._executable is None:
            raise createPoptorchError(NOT_COMPILED)
        return self._executable

    def _remember_host(self) -> None:
        """Keep the host's numbers as they are after a copy: what differs later was edited."""
        plain = {name: tensor.detach().as_subclass(torch.Tensor) for name, tensor in self._host().items()}
        self._remembered = {name: (tensor, tensor.clone()) for name, tensor in plain.items()}

    def edited_host_weights(self) -> List[str]:
        """Names of host tensors that were edited since the last copy, in either direction. PopTorch has no such method: there the
        edits are lost without a word (_poplar_executor.py:555-598)."""
        return [name for name, (now, before) in self._remembered.items() if not torch.equal(now, before)]

    def _warn_of_edits(self) -> None:
        edited = self.edited_host_weights()
        if edited:
            logger.warning("host weights were edited, but the device does not have the edits and will overwrite them: %s. Call "
                           "copyWeightsToDevice() after an edit", ", ".join(edited))
            for name in edited:
                self._remembered[name][1].copy_(self._remembered[name][0])

    def copyWeightsToHostIfNeeded(self) -> bool:
        """True if the host's weights were out of date and have been copied."""
        if not self._dirty_host_weights:
            return False
        self.copyWeightsToHost()
        return True

    def copyWeightsToHost(self) -> None:
        """Device to host. What the host had is overwritten. Error before compilation."""
        executable = self._require_compiled()
        self._dirty_host_weights = False
        executable.store(self._host())
        self._host_weights_version += 1
        self._remember_host()

    def copyWeightsToDevice(self) -> None:
        """Host to device. Progress that was not copied to the host is lost. Error before compilation."""
        executable = self._require_compiled()
        self._dirty_host_weights = False
        if isinstance(self._optimizer, optim.Optimizer):
            self._optimizer.state_dict()
        executable.load(self._host())
        self._remember_host()

    def copyNamedBuffersToDevice(self) -> None:
        """Only the buffers named by Options.updatableNamedBuffers; Error when there are none.

        As in PopTorch, the optimizer's state is fetched first (_poplar_executor.py:616), and buffers arrive in the wrong places
        where the alphabet and the order of the graph's inputs differ (PoplarExecutable.cpp:209, LowerToPopart.cpp:1060).
        """
        executable = self._require_compiled()
        if "updatableNamedBuffers" not in self._options._Popart.options:
            raise createPoptorchError("No named buffers marked as updatable via updatableNamedBuffers option")
        self._dirty_host_weights = False
        if self._optimizer is not None:
            self._optimizer.state_dict()
        host = dict(self._model.named_buffers())
        names = sorted(set(self._options._Popart.options["updatableNamedBuffers"]))
        inputs = [name for name in _in_order_of_moving(self._model) if name in names]
        for source, place in zip(names, inputs):
            if host[source].shape != host[place].shape:
                raise createPoptorchError(f"copyNamedBuffersToDevice would write {source} into {place}: PopTorch sorts names, "
                                          "and PopART takes the buffers in the order in which the module holds them")
        executable.load_buffers({place: host[source] for source, place in zip(names, inputs)})
        for name in names:
            plain = host[name].detach().as_subclass(torch.Tensor)
            self._remembered[name] = (plain, plain.clone())

    def _check_updatable(self, live: Set[str]) -> None:
        """Error for an updatable buffer that is not in the graph: PopART looks for it (tests/buffers_test.py:103)."""
        for name in self._options._Popart.options.get("updatableNamedBuffers", ()):
            if name not in live:
                raise createPoptorchError(f"{name}, named by Options.updatableNamedBuffers, is no buffer that the model uses")

    def load_state_dict(self, state_dict: Dict[str, torch.Tensor], strict: bool = True) -> Any:
        """Load into the host's model; pushed to the device at once when attached, otherwise by the next attach."""
        result = self._user_model.load_state_dict(state_dict, strict)
        if self.isAttachedToDevice():
            self.copyWeightsToDevice()
        return result

    def _sync_user_model(self) -> None:
        copy = getattr(self._user_model, "copyWeightsToHostIfNeeded", None)
        if callable(copy):
            copy()

    def _follow_training_weights(self) -> None:
        """An inference model shows what its training twin learned (:1245-1262)."""
        if not wrapping.is_wrapped(self._user_model):
            return
        self._sync_user_model()
        version = self._user_model._host_weights_version
        if version != self._host_weights_version:
            self.copyWeightsToDevice()
            self._host_weights_version = version

    # -- optimizer -------------------------------------------------------------------------------------------------------
    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Read the groups' values again and use them from the next call on. Error when a constant one would change."""
        if self.isCompiled() and optimizer is not self._optimizer:
            if isinstance(self._optimizer, optim.Optimizer):
                self._read_optimizer_state()
                self._optimizer.__dict__.pop("state_dict", None)
            if isinstance(optimizer, optim.Optimizer):
                optimizer.ipu_state_is_dirty = True
        if isinstance(optimizer, optim.Optimizer):
            optimizer.state_dict = MethodType(_device_state_dict, self)  # type: ignore[method-assign]
        self._optimizer = optimizer
        converted = optimconvert.convert(optimizer, self._tracker, self._options, self.isCompiled())
        if self._executable is not None and converted != self._converted:
            self._executable.set_optimizer(converted, self._groups())
        self._converted = converted
        if self.isAttachedToDevice():
            self._write_optimizer_state()

    def _groups(self) -> List[List[str]]:
        """Names of the parameters in each optimizer group, found by their data; KeyError for one that is not in the model.

        Objects that were seen before are known by identity: reading their data would copy the weights back.
        """
        assert self._optimizer is not None
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        if any(id(parameter) not in self._names for parameter in parameters):
            by_data = {tensor.data_ptr(): name for name, tensor in self._host().items()}
            self._names.update({id(parameter): by_data[parameter.data_ptr()] for parameter in parameters})
        return [[self._names[id(parameter)] for parameter in group["params"]] for group in self._optimizer.param_groups]

    def _read_optimizer_state(self) -> None:
        optimizer = self._optimizer
        if isinstance(optimizer, optim.Optimizer) and optimizer.host_state_is_dirty:
            state = self._require_compiled().read_state()
            optimizer.set_state_dict({**state, **torch.optim.Optimizer.state_dict(optimizer)})
            optimizer.ipu_state_is_dirty = False

    def _write_optimizer_state(self) -> None:
        optimizer = self._optimizer
        if isinstance(optimizer, optim.Optimizer) and optimizer.ipu_state_is_dirty:
            if optimizer.has_state():
                self.copyWeightsToHostIfNeeded()
                self._require_compiled().write_state(optimizer._state_dict)
            optimizer.ipu_state_is_dirty = False

    # -- device ----------------------------------------------------------------------------------------------------------
    def _on_attach(self) -> None:
        executable = self._require_compiled()
        executable.load(self._host())
        self._remember_host()
        optimizer = self._optimizer
        if isinstance(optimizer, optim.Optimizer):
            optimizer.ipu_state_is_dirty = optimizer.has_state()
            optimizer.host_state_is_dirty = not optimizer.has_state()
            self._write_optimizer_state()

    def attachToDevice(self) -> None:
        """Take the IPUs and upload weights, optimizer state and random state; Error when attached."""
        self._require_compiled()
        assert self._options.connection_type != enums.ConnectionType.Never, "Trying to attach to an offline device"
        if self._is_attached:
            raise createPoptorchError("Device is already attached")
        machine.acquire(self, self._ipus)
        self._is_attached = True
        self._on_attach()

    def detachFromDevice(self) -> None:
        """Copy everything back and give the IPUs to others; Error when not attached."""
        self._require_compiled()
        if not self._is_attached:
            raise createPoptorchError("Device is not attached")
        if self._training:
            self.copyWeightsToHostIfNeeded()
            self._read_optimizer_state()
        machine.release(self)
        self._is_attached = False

    def destroy(self) -> None:
        """Copy everything back, free the IPUs, give the model its class back. Does nothing before compilation."""
        if self._executable is None:
            return
        if self._training:
            self.copyWeightsToHostIfNeeded()
            self._read_optimizer_state()
        machine.release(self)
        self._is_attached = False
        self._executable = None
        if self._training:
            wrapping.unwrap(self._user_model)


def _in_order_of_moving(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Names of the buffers as `module.to(ipu)` comes to them: children before their parent."""
    for name, child in module._modules.items():
        if child is not None:
            yield from _in_order_of_moving(child, f"{prefix}{name}.")
    yield from (f"{prefix}{name}" for name, buffer in module._buffers.items() if buffer is not None)


def _device_state_dict(executor: DeviceState) -> Dict[str, Any]:
    executor._read_optimizer_state()
    return executor._optimizer.get_state_dict()  # type: ignore[union-attr]
