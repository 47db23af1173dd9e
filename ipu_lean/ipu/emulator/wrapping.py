"""The classes that a training model's module, parameters and buffers get, so that reading them copies the weights back first
(python/_poplar_executor.py:245-384). The objects stay the same Python objects."""
from __future__ import annotations

import copyreg
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Callable, Optional, Tuple

import torch
from torch import nn

from .errors import createPoptorchError

if TYPE_CHECKING:
    from .executor import PoplarExecutor

_PREFIX = "Poptorch"


def is_wrapped(model: Any) -> bool:
    return "_emulator_parent" in type(model).__dict__


def unwrapped_class(model: nn.Module) -> type:
    return type(model).__bases__[0] if is_wrapped(model) else type(model)


def wrap(model: nn.Module, executor: PoplarExecutor) -> None:
    """Change the classes of a module and of its parameters and buffers. Error for a buffer of a tensor subclass."""
    parent = weakref.ref(executor)
    parameter_class, buffer_class = _tensor_classes(parent)
    for buffer in model.buffers():
        if type(buffer) is not torch.Tensor:
            raise createPoptorchError(f"All buffers must be an instance of torch.Tensor (Got {type(buffer)})")
    for parameter in model.parameters():
        parameter.__class__ = parameter_class
    for buffer in model.buffers():
        buffer.__class__ = buffer_class
    model.__class__ = _model_class(type(model), parent)


def unwrap(model: nn.Module) -> None:
    """Give everything its own class back."""
    if not is_wrapped(model):
        raise createPoptorchError("model was never wrapped")
    model.__class__ = unwrapped_class(model)
    for parameter in model.parameters():
        parameter.__class__ = nn.Parameter
    for buffer in model.buffers():
        buffer.__class__ = torch.Tensor


def _tensor_classes(parent: Callable[[], Optional[PoplarExecutor]]) -> Tuple[type, type]:
    def sync() -> None:
        executor = parent()
        if executor is not None:
            executor.copyWeightsToHostIfNeeded()

    class PoptorchParameter(nn.Parameter):
        def __getattribute__(self, name: str) -> Any:
            sync()
            return object.__getattribute__(self, name)

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            sync()
            with torch._C.DisableTorchFunction():
                return func(*args, **(kwargs or {}))

    class PoptorchBuffer(torch.Tensor):
        def __getattribute__(self, name: str) -> Any:
            sync()
            return object.__getattribute__(self, name)

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            sync()
            with torch._C.DisableTorchFunction():
                return func(*args, **(kwargs or {}))

        def __deepcopy__(self, memo: Any) -> torch.Tensor:
            sync()
            return memo.setdefault(id(self), self.detach().as_subclass(torch.Tensor).clone())

        def __reduce_ex__(self, protocol: Any) -> Any:
            sync()
            return self.detach().as_subclass(torch.Tensor).__reduce_ex__(protocol)

    return PoptorchParameter, PoptorchBuffer


def _model_class(base: type, parent: Callable[[], Optional[PoplarExecutor]]) -> type:
    class PoptorchModel(base):  # type: ignore[misc,valid-type]
        _emulator_parent = staticmethod(parent)

        def copyWeightsToHostIfNeeded(self) -> bool:
            """True if the host's weights were out of date and have been copied."""
            executor = parent()
            return executor.copyWeightsToHostIfNeeded() if executor is not None else False

        def destroy(self) -> None:
            """Release the IPUs and the executable, and give the model its class back."""
            executor = parent()
            if executor is not None:
                executor.destroy()

        def __getattribute__(self, name: str) -> Any:
            if name == "_host_weights_version":
                executor = parent()
                return None if executor is None else executor._host_weights_version
            if name in ("_buffers", "_parameters", "forward"):
                self.copyWeightsToHostIfNeeded()
            return object.__getattribute__(self, name)

        def __getattr__(self, name: str) -> Any:
            value = super().__getattr__(name)
            if isinstance(value, nn.Parameter):
                self.copyWeightsToHostIfNeeded()
            return value

        def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
            """Plain tensors that load anywhere, without the attributes that parameters carry."""
            found = super().state_dict(*args, prefix=prefix, keep_vars=keep_vars)
            made = OrderedDict() if destination is None else destination
            for key, value in found.items():
                made[key] = _plain(value)
            return made

        def __reduce_ex__(self, protocol: Any) -> Any:
            """Pickles as the original class."""
            self.copyWeightsToHostIfNeeded()
            return copyreg._reconstructor, (base, object, None), dict(self.__dict__)

    PoptorchModel.__name__ = _PREFIX + base.__name__
    return PoptorchModel


def _plain(value: Any) -> Any:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach(), requires_grad=value.requires_grad)
    if isinstance(value, torch.Tensor):
        return value.detach().as_subclass(torch.Tensor)
    return value
