"""The engine for CPU and GPU, and the mirror of what an IPU call does: micro-batches in turn, one mean gradient, one update.

loss = mean over micro-batches of (mean over the micro-batch's tokens)         the same on every device
rows of a global batch, in order: [accumulation, replicas, micro]              replicas not given to a process are run in turn
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, Callable, Dict, List, Optional

import numpy as np
import torch
from torch import nn

from ipu_lean.config import Config
from ipu_lean.config.layer_kinds import draw_before, standing_draw
from ipu_lean.data import blank_batch
from ipu_lean.errors import ConfigError, RunError
from ipu_lean.optim import Schedule, apply_schedule
from ipu_lean.optim.fused import FusedUpdate
from ipu_lean.train import gradients
from ipu_lean.train.branches import compile_branches
from ipu_lean.train.engines import parallel
from ipu_lean.train.engines.protocol import Batch, StepResult
from ipu_lean.train.precision import LossScale, autocast, to_precision
from ipu_lean.train.world import World


class TorchEngine:
    """Trains `step.model` (see `engines/protocol.py` for the calls).

    Args:
        step: (tokens, labels) int32 `[rows, seq]` -> (mean loss, float32 `[K]` sums); holds the model as `.model`.
        make_optimizer: model -> optimizer, called after wrapping because FSDP replaces parameters; None for an engine that only
        evaluates. schedule: the factor on every group's learning rate by update. config: batch, precision, clipping and
        parallel strategy are read from it. world: the processes that train together. say: takes a line about compilation.
    """

    updates_per_call = 1
    eval_micro_batches = 1
    holds_weights = False

    def __init__(
        self,
        step: nn.Module,
        make_optimizer: Optional[Callable[[nn.Module], torch.optim.Optimizer]],
        schedule: Optional[Schedule],
        config: Config,
        world: Optional[World] = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.world = world or World()
        self.world.check_replicas(config.batch.replicas)
        self.config, self.schedule, self.update = config, schedule, 0
        self.model = step.model
        self.shards = parallel.Shards(step.model)
        if config.precision == "bf16-pure" and self.world.size > 1:
            raise ConfigError(
                "processes would average their gradients in 16 bits",
                key="precision",
                value=config.precision,
                suggestion="use one process, or `bf16-mixed`",
            )
        to_precision(step, config.precision).to(self.world.device)
        if make_optimizer and config.train.compile == "branches":
            compile_branches(step.model, self.world.device.type, lambda: self._warm_up(step), say)
        strategy = "single" if make_optimizer is None else parallel.strategy_name(config, self.world)
        self.wrapped = parallel.wrap(step, strategy, self.world)
        self.sharded = strategy == "fsdp"
        self.shards.bind(self.world, self.sharded)
        # Evaluation under DDP needs no exchange; under FSDP it needs the weights gathered.
        self.evaluated = self.wrapped if self.sharded else step
        self.optimizer = make_optimizer(step.model) if make_optimizer else None
        self.fused = self._fuse() if self.optimizer is not None and config.memory.fused_update else None
        self.scale = LossScale(config.train.fp16_scale) if config.precision == "fp16-mixed" else None
        if strategy == "ddp":
            self._settle()

    def _fuse(self) -> FusedUpdate:
        """Updates inside the backward pass. ConfigError for several processes, which torchrun may have started."""
        if self.world.size > 1:
            rule = f"{self.world.size} processes would have to exchange a gradient before the update that its completion starts"
            raise ConfigError(rule, key="memory.fused_update", value=True, suggestion="use one process, or false")
        return FusedUpdate(self.optimizer, lambda gradient: gradients.norms_of([gradient])[0])

    def _warm_up(self, step: nn.Module) -> None:
        """A pass of training and one of evaluation that leave no trace but compiled code."""
        inputs, labels = blank_batch(self.config, self.config.batch.micro)
        device = self.world.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            with autocast(self.config.precision, device.type):
                loss, _ = step.train()(*self._tensors((inputs, np.zeros_like(labels))))
            loss.backward()
            with torch.no_grad(), autocast(self.config.precision, device.type):
                step.eval()(*self._tensors((inputs, labels)))
        step.train()
        for parameter in step.parameters():
            parameter.grad = None

    def _settle(self) -> None:
        """One pass that trains nothing. DDP lays its buckets out anew after its first backward pass, which changes the order in
        which gradients are added: without this, a resumed run's first step would round unlike the same step of an uninterrupted
        run."""
        inputs, labels = blank_batch(self.config, self.config.batch.micro)
        with autocast(self.config.precision, self.world.device.type):
            loss, _ = self.wrapped(*self._tensors((inputs, np.zeros_like(labels))))
        loss.backward()
        self.optimizer.zero_grad(set_to_none=True)

    def describe(self) -> Dict[str, str]:
        """Nothing that the configuration does not say."""
        return {}

    # -- one update ------------------------------------------------------------------------------------------------------
    def train_step(self, batch: Batch) -> StepResult:
        """One weight update from this process's rows of the global batch."""
        assert self.optimizer is not None and self.schedule is not None
        micro = self.config.batch.micro
        rows = batch[0].shape[0]
        assert rows % micro == 0, f"{rows} rows are not a whole number of micro-batches of {micro}"
        factor = self.schedule.lr_at(self.update, self.config.batch.device_iterations)
        apply_schedule(self.optimizer, factor)
        self.optimizer.zero_grad(set_to_none=True)
        self._redraw(draw_before(self.config.model, self.update, self.config.batch.device_iterations))
        self.wrapped.train()
        losses, sums = self._accumulate(batch, rows // micro)
        loss, totals = self._reduce(losses, sums, rows // micro)
        self._check_loss(loss)
        norm, skipped = self._apply(rows // micro)
        self.update += 1
        tokens = int(batch[1].size) * self.world.size
        return StepResult(loss, tuple(totals), self.config.optimizer.lr * factor, tokens, None if skipped else norm, skipped)

    def _check_loss(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise RunError(f"the loss is {loss} at step {self.update + 1}.")

    def _redraw(self, step: Optional[int]) -> None:
        """New random directions for hashed attention, where they are due."""
        if step is not None:
            self.model.redraw(step)

    def _accumulate(self, batch: Batch, count: int) -> Any:
        """Forward and backward of `count` micro-batches; gradients are exchanged in the last one only.

        They are left as sums: `_apply` divides once, which is PopTorch's order (`MeanReductionStrategy.Post`), so that the two
        round alike.
        """
        scale = 1.0 if self.scale is None else self.scale.scale
        tokens, labels = self._tensors(batch)
        losses: List[torch.Tensor] = []
        sums: List[torch.Tensor] = []
        for index, (x, y) in enumerate(zip(tokens.chunk(count), labels.chunk(count))):
            last = index == count - 1
            with parallel.no_sync(self.wrapped) if not last else contextlib.nullcontext():
                with autocast(self.config.precision, self.world.device.type):
                    loss, part = self.wrapped(x, y)
                if self.fused is not None:
                    assert count == 1, "the configuration's rules see to it"
                    self._check_loss(float(loss.detach()))  # before it moves weights
                    self.fused.begin()
                (loss * scale if scale != 1.0 else loss).backward()
            losses.append(loss.detach())
            sums.append(part.detach())
        return losses, sums

    def _reduce(self, losses: List[torch.Tensor], sums: List[torch.Tensor], count: int) -> Any:
        """(mean loss over all micro-batches and processes, metric sums), added up in float64."""
        flat = torch.cat([torch.stack(losses).double().sum().reshape(1), torch.stack(sums).double().sum(0)])
        values = self.world.sum(flat.tolist())
        return values[0] / (count * self.world.size), values[1:]

    def _apply(self, count: int) -> Any:
        """Mean of `count` summed micro-batches, unscale, check, clip and step.

        Returns (gradient norm, whether the update was skipped).
        """
        if self.fused is not None:  # all but what waited has been updated
            norm = float(gradients.combined_norm(self.fused.finish(), self.world.device))
            if not math.isfinite(norm):
                raise RunError(f"the gradient's norm is {norm} at step {self.update + 1}; these weights are spoilt.")
            return norm, False
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        found = gradients.gradients_of(parameters)
        scale = 1.0 if self.scale is None else self.scale.scale
        gradients.divide(found, scale * count)
        norm = float(gradients.global_norm(found, sharded=self.sharded, device=self.world.device))
        if not math.isfinite(norm):
            if self.scale is None:
                raise RunError(f"the gradient's norm is {norm} at step {self.update + 1}.")
            self.scale.update(True, self.update + 1)
            return norm, True
        clip = self.config.train.clip
        if clip is not None:
            gradients.scale_gradients(found, gradients.clip_factor(norm, clip))
        self.optimizer.step()
        if self.scale is not None:
            self.scale.update(False, self.update + 1)
        return norm, False

    def eval_step(self, batch: Batch) -> np.ndarray:
        """Metric sums of this process's rows, float64 `[K]`."""
        training = self.model.training
        self.evaluated.eval()
        try:
            with torch.no_grad(), autocast(self.config.precision, self.world.device.type):
                _, sums = self.evaluated(*self._tensors(batch))
        finally:
            self.evaluated.train(training)
        return sums.double().cpu().numpy()

    def _tensors(self, batch: Batch) -> Any:
        return tuple(torch.from_numpy(array).to(self.world.device, non_blocking=True) for array in batch)

    # -- state -----------------------------------------------------------------------------------------------------------
    def sync_to_host(self) -> Dict[str, torch.Tensor]:
        """Full weights by name, on the host."""
        return self.shards.weights()

    def optimizer_state(self) -> Dict[str, Any]:
        """Full optimizer state by parameter name, on the host."""
        return parallel.optimizer_state(self.optimizer, self.shards)

    def load_optimizer_state(self, state: Dict[str, Any]) -> None:
        """Take over what `optimizer_state` returned, in a world of any size."""
        parallel.load_optimizer_state(self.optimizer, self.shards, state)

    def state_dict(self) -> Dict[str, Any]:
        """Updates made and loss scale, as plain JSON."""
        return {"update": self.update, "scale": None if self.scale is None else self.scale.state_dict()}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.update = int(state["update"])
        self._redraw(standing_draw(self.config.model, self.update, self.config.batch.device_iterations))
        if self.scale is not None and state.get("scale"):
            self.scale.load_state_dict(state["scale"])

    def attach(self) -> None:
        """A CPU or GPU is shared freely."""

    def detach(self) -> None:
        """A CPU or GPU is shared freely."""

    def close(self) -> None:
        """Drop gradients and optimizer state."""
        if self.fused is not None:
            self.fused.remove()
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
            self.optimizer.state.clear()
