"""`trainingModel`, `inferenceModel` and what stands beside them (python/__init__.py:660-770)."""
from __future__ import annotations

import copy
from typing import Any, Callable, Optional, Union

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from . import executor, wrapping
from .errors import createPoptorchError
from .executor import PoplarExecutor
from .options import Options

__version__ = "3.4.0"


def trainingModel(model: Union[nn.Module, PoplarExecutor], options: Optional[Options] = None,
                  optimizer: Optional[torch.optim.Optimizer] = None) -> PoplarExecutor:
    """Train `model` on the device. A shallow copy is traced: set `train()` or `eval()` before.

    Without an optimizer: SGD(lr=0.01) over all parameters. RuntimeError when the model is in a trainingModel already.
    """
    module = model._user_model if isinstance(model, PoplarExecutor) else model
    if wrapping.is_wrapped(module):
        raise RuntimeError("Model has already been wrapped in 'poptorch.trainingModel'. Call model.destroy() on the model to "
                           "unwrap before wrapping again.")
    return PoplarExecutor(copy.copy(module), options, True, __version__, optimizer, user_model=module)


def inferenceModel(model: Union[nn.Module, PoplarExecutor], options: Optional[Options] = None) -> PoplarExecutor:
    """Run `model` on the device. The weights are those of the model that is given, also while it is being trained."""
    module = model._user_model if isinstance(model, PoplarExecutor) else model
    return PoplarExecutor(_shallow(module), options, False, __version__)


def _shallow(module: nn.Module) -> nn.Module:
    """`copy.copy`, but a wrapped model's copy stays wrapped: it must see that the weights have changed."""
    if not wrapping.is_wrapped(module):
        return copy.copy(module)
    twin = object.__new__(type(module))
    object.__getattribute__(twin, "__dict__").update(object.__getattribute__(module, "__dict__"))
    return twin


def load(filename: str, edit_opts_fn: Optional[Callable[[Options], None]] = None) -> PoplarExecutor:
    """The emulator has no executables: always an Error."""
    raise createPoptorchError(f"{filename}: executables cannot be loaded, the emulator has none")


def registerPreCompileHook(hook: Callable[[], None]) -> RemovableHandle:
    """Called before each trace; RuntimeError unless callable. The handle removes it."""
    return _register(executor._before, hook, "Pre-compile hook must be callable")


def registerPostCompileHook(hook: Callable[[], None]) -> RemovableHandle:
    """Called when a trace ends; RuntimeError unless callable. The handle removes it."""
    return _register(executor._after, hook, "Post-compile hook must be callable")


def _register(hooks: Any, hook: Callable[[], None], message: str) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(message)
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle
