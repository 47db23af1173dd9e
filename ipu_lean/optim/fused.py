"""Updates inside the backward pass: each parameter moves as soon as its gradient is complete, and the gradient is freed.

Gradients are then never all alive. Autograd adds up all contributions to a parameter (a tied matrix, a shared layer) before it
calls the hook, and no node reads a parameter after its gradient is complete, so the numbers are those of an update at the end,
bit for bit.

Who owns gradients: autograd alone. The optimizers here read a gradient where autograd put it; there is no flat buffer of
gradients that views could point into. With `parameter.grad = None` the last reference goes, and the memory with it. (DDP's
gradients are views of its buckets, which live on: one more reason why several processes are refused.)
"""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence

import torch

from ipu_lean import _compat
from ipu_lean.errors import ConfigError, EnvironmentProblem
from ipu_lean.optim.any_precision import AnyPrecisionAdamW

KEY = "memory.fused_update"
WAITING = 1 << 12
"""Elements; smaller gradients (biases, norm gains) wait for the end of the backward pass, where they are updated together."""
SEPARABLE = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
"""torch's optimizers whose step updates every parameter from its own gradient and state only."""


def check_torch() -> None:
    """EnvironmentProblem if this torch does not say when a gradient is complete."""
    if not hasattr(torch.Tensor, "register_post_accumulate_grad_hook"):
        raise EnvironmentProblem(
            f"`{KEY}: true` needs torch 2.1 or newer, which says when a gradient is complete; this is torch {torch.__version__}. "
            f"Set `{KEY}: false`."
        )


class FusedUpdate:
    """Makes the updates of `optimizer` inside the backward pass between `begin` and `finish`; others are left alone.

    Args:
        measure: is given every complete gradient before it is used up; `finish` returns what it said.
    Raises:
        EnvironmentProblem: torch before 2.1. ConfigError: an optimizer that is not known to update tensor by tensor.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, measure: Callable[[torch.Tensor], Any] = lambda gradient: None) -> None:
        check_torch()
        self.optimizer, self.measure = optimizer, measure
        self._update = _updater(optimizer)
        self._open = False
        self._measured: Dict[int, Any] = {}
        self._waiting: List[torch.Tensor] = []
        self._handles = [
            _compat.parameter_hook_after_accumulation(parameter, self._completed)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]

    def begin(self) -> None:
        """Before the backward pass of an update; learning rates are set, gradients are None."""
        if isinstance(self.optimizer, AnyPrecisionAdamW):
            self.optimizer.settle()
        self._measured, self._waiting, self._open = {}, [], True

    def finish(self) -> List[Any]:
        """After it: updates what waited. Returns what `measure` said of each gradient, in the order of the groups."""
        self._open = False
        if self._waiting:
            self._update(self._waiting)
        for parameter in self._waiting:
            parameter.grad = None
        self._waiting = []
        ordered = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return [self._measured[id(parameter)] for parameter in ordered if id(parameter) in self._measured]

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _completed(self, parameter: torch.Tensor) -> None:
        """Called by autograd when the gradient of `parameter` is complete."""
        gradient = parameter.grad
        if not self._open or gradient is None:
            return
        if id(parameter) in self._measured:
            raise ConfigError(
                "an update has one backward pass, and a gradient came a second time", key=KEY, value=True, suggestion="use false"
            )
        self._measured[id(parameter)] = self.measure(gradient)
        if gradient.numel() < WAITING:
            self._waiting.append(parameter)
            return
        del gradient
        self._update([parameter])
        parameter.grad = None


def _updater(optimizer: torch.optim.Optimizer) -> Callable[[Sequence[torch.Tensor]], None]:
    """What updates some parameters as the optimizer's own step would."""
    if isinstance(optimizer, AnyPrecisionAdamW):
        return optimizer.step_of
    if type(optimizer) not in SEPARABLE:
        known = ", ".join(kind.__name__ for kind in (AnyPrecisionAdamW, *SEPARABLE))
        raise ConfigError(
            f"{type(optimizer).__name__} is not known to update each tensor from its own gradient alone ({known} are)",
            key=KEY,
            value=True,
            suggestion="use one of these, or false",
        )
    return lambda parameters: _step_of(optimizer, parameters)


@torch.no_grad()
def _step_of(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """The optimizer's own step, with groups that hold these parameters only."""
    wanted, groups = {id(parameter) for parameter in parameters}, optimizer.param_groups
    some = [{**group, "params": [p for p in group["params"] if id(p) in wanted]} for group in groups]
    optimizer.param_groups = [group for group in some if group["params"]]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = groups
