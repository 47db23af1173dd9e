"""A reversible backward pass inside the step that PopTorch traces.

PopTorch differentiates the traced forward pass itself. Here that pass holds the whole computation: the stack runs on detached
weights, is then walked backwards while its inputs are rebuilt by the coupling's inverse, and each branch's vector-Jacobian
product is evaluated as ordinary operations (reversible/vjp.py). What PopTorch is left to differentiate is the sum of
W * grad_W.detach() over the weights, whose derivative is grad_W: its own optimizer, accumulation, replication, clipping and loss
scaling go on as ever. Between the two passes only the gradients are alive, one copy a parameter; the stack's activations are not.
"""

from __future__ import annotations

from typing import Any, Tuple

from torch import Tensor, nn

from ipu_lean.config import Config, derived
from ipu_lean.config.layout import is_half, loss_scaling
from ipu_lean.errors import ConfigError, RunError
from ipu_lean.ipu.placement import rows_of
from ipu_lean.ipu.step import PopTrainStep
from ipu_lean.ipu.walk import Walk
from ipu_lean.reversible import remember
from ipu_lean.reversible.vjp import Underivable


class SurrogateStep(PopTrainStep):
    """A training step whose backward pass runs in its forward pass: (loss, sums, surrogate), the surrogate marked.

    Loss and sums are the model's. In evaluation it is a `PopTrainStep`.

    Args:
        config: gives the micro-batch, the placement and the loss scale.
    Raises:
        ConfigError: the model's backward pass cannot be written in PopTorch's operations.
    """

    def __init__(self, model: nn.Module, poptorch: Any, config: Config) -> None:
        super().__init__(model, poptorch)
        self._choose_orders(remember)  # made in the walk forward, found again in the walk back
        rows = rows_of(model, config)
        begin = poptorch.Block.start if len({row.ipu for row in rows}) > 1 else None
        self._tracing = poptorch.isRunningOnIpu
        # Not registered as modules: their parts are the model's own.
        self._walk = (Walk(model, loss_scaling(config) if is_half(config) else 1.0, rows, begin, poptorch.isRunningOnIpu),)
        self._prepared = (config.batch.micro, config.model.seq)
        model.train()
        try:
            self._walk[0].prepare(*self._prepared)
        except Underivable as problem:
            raise ConfigError(
                f"the backward pass cannot be written in PopTorch's operations: {problem}",
                key="memory.ipu_backward",
                value="surrogate",
                suggestion="use `memory.ipu_backward: recompute`",
            ) from problem

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        self._walk[0].prepare(*self._prepared)

    def _run(self, tokens: Tensor, labels: Tensor) -> Tuple[Tensor, ...]:
        if not self.training:
            return super()._run(tokens, labels)
        if self._tracing() and tuple(tokens.shape) != self._prepared:
            raise RunError(
                f"the surrogate backward pass was derived for micro-batches of {self._prepared[0]} x {self._prepared[1]} tokens, "
                f"and is traced with {tokens.shape[0]} x {tokens.shape[1]}"
            )
        loss, sums, surrogate = self._walk[0].run(tokens, labels)
        return loss, sums, self._mark(surrogate)


def make_step(model: nn.Module, config: Config, poptorch: Any) -> PopTrainStep:
    """The step that the configuration asks for, over `model` in its final type."""
    return SurrogateStep(model, poptorch, config) if derived.surrogate(config) else PopTrainStep(model, poptorch)
