"""Blocks: which part of the model runs on which IPU (python/ops.py:558-780). All are no-ops outside a trace."""
from __future__ import annotations

import functools
from collections import OrderedDict
from typing import Any, Callable, Optional

import torch
from torch import nn

from .errors import createPoptorchError
from .tracestate import current_recorder


class Block(nn.Module):
    """`with Block("encoder", ipu_id=1): …` — ops inside run on that IPU.

    Leaving the block clears the active IPU, so that a later op outside any block fails "No active Block"; leaving an inner
    block does so for the rest of the outer one as well.
    """

    _stages_manager: Any = None

    def __init__(self, user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        super().__init__()
        self._user_id = user_id
        self._ipu_id = ipu_id

    @staticmethod
    def useAutoId() -> None:
        """Number the blocks without a name from 0 again; call it first in `forward`."""
        if Block._stages_manager is not None:
            Block._stages_manager.resetAutoId()

    @staticmethod
    def start(user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        """Open a block that the next one, or nothing, closes."""
        if Block._stages_manager is not None:
            Block._stages_manager.beginStage(user_id, ipu_id)

    def __enter__(self) -> None:
        Block.start(self._user_id, self._ipu_id)

    def __exit__(self, type: Any, value: Any, traceback: Any) -> None:
        recorder = current_recorder()
        if recorder is not None:
            recorder.end_block()


class _BlockHook:
    """The forward pre-hook that `BeginBlock` registers. An automatic name is taken at the first call and kept."""

    def __init__(self, user_id: Optional[str], ipu_id: Optional[int]) -> None:
        self._user_id = user_id
        self._ipu_id = ipu_id

    def __call__(self, module: nn.Module, input: Any) -> None:
        manager = Block._stages_manager
        if manager is not None:
            if self._user_id is None:
                self._user_id = manager.nextAutoId()
            manager.beginStage(self._user_id, self._ipu_id)

    def __repr__(self) -> str:
        return f"BeginBlock(user_id={self._user_id}, ipu_id={self._ipu_id})"


class LegacyBeginBlockFn(nn.Module):
    """What `BeginBlock` returns for a callable that is no module."""

    def __init__(self, layer_to_call: Callable[..., Any], user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> None:
        super().__init__()
        self._hook = _BlockHook(user_id, ipu_id)
        self._layer_to_call = layer_to_call

    def __call__(self, *input: Any, **kwargs: Any) -> Any:
        self._hook(self, input)
        return self._layer_to_call(*input, **kwargs)


def BeginBlock(layer_to_call: nn.Module, user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> nn.Module:
    """From this module's forward on, until the next BeginBlock, ops run on `ipu_id`; returns the same module.

    Raises:
        Error: the module has a block already, or is neither a module nor callable.
    """
    if not isinstance(layer_to_call, nn.Module):
        if callable(layer_to_call):
            return LegacyBeginBlockFn(layer_to_call, user_id, ipu_id)
        raise createPoptorchError(f"BeginBlock takes a torch.nn.Module or a callable, got {type(layer_to_call)}")
    if any(isinstance(hook, _BlockHook) for hook in layer_to_call._forward_pre_hooks.values()):
        raise createPoptorchError("module has already been assigned to a block")
    layer_to_call.register_forward_pre_hook(_BlockHook(user_id, ipu_id))
    return layer_to_call


def removeBlocks(module: nn.Module) -> None:
    """Strip BeginBlock from a module and all below it; AssertionError unless a module."""
    assert isinstance(module, torch.nn.Module), f"expected a torch.nn.Module, got {type(module)}"
    for child in module.modules():
        kept = [(key, hook) for key, hook in child._forward_pre_hooks.items() if not isinstance(hook, _BlockHook)]
        child._forward_pre_hooks = OrderedDict(kept)


def BlockFunction(user_id: Optional[str] = None, ipu_id: Optional[int] = None) -> Callable[..., Any]:
    """Decorator: the function's ops form a block."""

    def decorator(func: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with Block(user_id, ipu_id):
                return func(*args, **kwargs)

        return wrapper

    return decorator
