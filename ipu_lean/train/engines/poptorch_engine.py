"""The engine for IPUs: one executor call splits, runs, differentiates, accumulates and steps, `device_iterations` times.

Works on the real PopTorch and on the emulator alike. Training and evaluation are two executors, and one of them holds the IPUs.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any, Callable, Dict, Iterator, List, Optional

import numpy as np
import torch
from torch import nn

from ipu_lean.config import Config
from ipu_lean.config.layout import eval_device_iterations
from ipu_lean.errors import CheckpointError, ConfigError, RunError
from ipu_lean.ipu import describe_options, load_poptorch, make_optimizer, make_options, make_step, place, to_precision
from ipu_lean.ipu import optimizer_state as moments
from ipu_lean.ipu.dist import Distribution
from ipu_lean.ipu.failures import explain, waiting
from ipu_lean.ipu.guard import HostGuard
from ipu_lean.ipu.plan.advice import out_of_memory
from ipu_lean.ipu.rotations import Redraw
from ipu_lean.optim import Schedule, apply_schedule
from ipu_lean.train.engines.protocol import Batch, DeviceFailure, StepResult
from ipu_lean.train.world import World

MOST_IPUS = 64  # PopTorch's limit (CompilerImpl.cpp:234)
_PREFIX = "model."  # the traced step holds the model under this name


class PopTorchEngine:
    """Trains `model` on IPUs (see `engines/protocol.py` for the calls).

    Args:
        model: on the CPU; its blocks are marked and it stays wrapped until `close`.
        schedule: the factor on every group's learning rate by update; None for an engine that only evaluates.
        config: placement, options, batch. world: the processes that train together (PopDist's instances).
        say: told when a compilation begins, goes on for long, and ends.
    Raises:
        EnvironmentProblem: no PopTorch. ConfigError: what cannot be placed.
    """

    holds_weights = True

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        schedule: Optional[Schedule] = None,
        world: Optional[World] = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.config, self.schedule, self.world, self.say = config, schedule, world or World(), say
        self.poptorch = poptorch = load_poptorch(config.device)
        self.updates_per_call = config.batch.device_iterations
        self.update = 0
        self.local_replicas = config.batch.replicas // self.world.size
        self.eval_micro_batches = eval_device_iterations(config) * self.local_replicas
        self.model = to_precision(model, config)
        self.placement = place(self.model, config, poptorch)
        count = self.placement.ipus * self.local_replicas
        if count > MOST_IPUS:
            raise ConfigError(
                f"{self.local_replicas} replicas of {self.placement.ipus} are {count} IPUs; a process drives at most {MOST_IPUS}",
                key="batch.replicas",
                value=config.batch.replicas,
                suggestion="start several instances with poprun (scripts/pod64.sh)",
            )
        self.step = make_step(self.model, config, poptorch)
        distribution = Distribution.current(config)
        self.options = make_options(config, poptorch, distribution.fresh_options, self.local_replicas)
        self._redraw = Redraw(self.step, config)
        if self._redraw.names:
            self.options.train.updatableNamedBuffers(self._redraw.names)
        self.optimizer: Any = None
        self.executor: Any = None
        self.evaluator: Any = None
        self._guard = HostGuard(self.model)
        self._factor: Optional[float] = None
        self._saved_moments: Optional[moments.State] = None
        self._saved_random: Optional[List[int]] = None
        self._saved_scale: Optional[float] = None
        if schedule is not None:
            self.optimizer = make_optimizer(self.model, config, poptorch)
            self._names = _names_in(self.optimizer, self.model)
            self.step.train()
            self.executor = poptorch.trainingModel(self.step, options=self.options.train, optimizer=self.optimizer)

    def describe(self) -> Dict[str, str]:
        """Texts for the run directory by file name: the placement, and the options as PopTorch has them."""
        return {"ipu_placement.txt": self.placement.table + "\n", "ipu_options.txt": describe_options(self.options)}

    def compile(self, batch: Batch) -> None:
        """Compile the training step for batches of this shape, and run nothing."""
        with self._failures():
            self._take(self.executor, _tensors(batch))

    # -- one call --------------------------------------------------------------------------------------------------------
    def train_step(self, batch: Batch) -> StepResult:
        """`device_iterations` weight updates from as many of this process's global batches, one after another."""
        assert self.schedule is not None and self.executor is not None
        iterations = self.updates_per_call
        if self.update % iterations:
            raise CheckpointError(
                f"{self.update} updates were made, and a call makes batch.device_iterations = {iterations}, so the learning rate "
                f"would change inside a call: go on on another device up to a multiple of {iterations} first."
            )
        inputs = _tensors(batch)
        factor = self.schedule.lr_at(self.update, iterations)
        with self._failures():
            self._guard.check(self.executor)
            draw, attached = self._redraw.due(self.update), self.executor.isAttachedToDevice()
            if draw is not None:
                self._redraw.write(draw)
            self._begin(self.executor, inputs)
            if draw is not None and attached:  # else it went along with the weights
                self._redraw.send(self.executor, self.optimizer)
            if factor != self._factor:
                apply_schedule(self.optimizer, factor)
                self.executor.setOptimizer(self.optimizer)
                self._factor = factor
            loss, sums = self.executor(*inputs)[:2]  # a surrogate may follow
        losses = self._means(loss, iterations)
        totals = self.world.sum(sums.double().reshape(-1, len(self.step.sum_names)).sum(0).tolist())
        for number, value in enumerate(losses, self.update + 1):
            if not math.isfinite(value):
                raise RunError(f"the loss is {value} at step {number}.")
        self.update += iterations
        tokens = int(batch[1].size) * self.world.size
        return StepResult(losses[-1], tuple(totals), self.config.optimizer.lr * factor, tokens, losses=tuple(losses))

    def _means(self, loss: torch.Tensor, iterations: int) -> List[float]:
        """Mean loss of each update, over its micro-batches and all processes."""
        mine = loss.double().reshape(iterations, -1).mean(1).tolist()
        return [value / self.world.size for value in self.world.sum(mine)]

    def eval_step(self, batch: Batch) -> np.ndarray:
        """Metric sums of `eval_micro_batches` micro-batches, float64 `[K]`."""
        inputs = _tensors(batch)
        with self._failures():
            if self.evaluator is None:
                # The mode is frozen in the trace, and training's executor has its own trace already or gets it later.
                self.step.eval()
                self.evaluator = self.poptorch.inferenceModel(self.step, options=self.options.eval)
            self._begin(self.evaluator, inputs)
            _, sums = self.evaluator(*inputs)
        return sums.double().reshape(-1, len(self.step.sum_names)).sum(0).numpy()

    # -- the device ------------------------------------------------------------------------------------------------------
    def _begin(self, executor: Any, inputs: Any) -> None:
        """Have `executor` compiled and on the IPUs. ConfigError for a program that is compiled for IPUs that are not there."""
        if self.config.ipu.offline_target is not None:
            raise ConfigError(
                "a program for an offline target cannot run",
                key="ipu.offline_target",
                value=self.config.ipu.offline_target,
                suggestion="leave it out; `ipu-lean compile` is what it is for",
            )
        self._take(executor, inputs)

    def _take(self, executor: Any, inputs: Any) -> None:
        """Give the IPUs to one executor: the other lets go first, which brings its weights to the host."""
        other = self.evaluator if executor is self.executor else self.executor
        if other is not None and other.isAttachedToDevice():
            other.detachFromDevice()
        if not executor.isCompiled():
            self.step.train(executor is self.executor)
            with waiting(self.say, self._what(executor)):
                executor.compile(*inputs)
            self.step.train()
            if executor is self.executor:
                self._restore_device_state()
        elif not executor.isAttachedToDevice():
            executor.attachToDevice()

    def _what(self, executor: Any) -> str:
        kind = "training" if executor is self.executor else "evaluation"
        count = self.placement.ipus * self.local_replicas
        return f"compiling the {kind} step for {count} IPU{'' if count == 1 else 's'}"

    def _restore_device_state(self) -> None:
        """Moments and random state of a checkpoint go to the device once there is one to take them."""
        if self._saved_moments or self._saved_scale is not None:
            state = self.optimizer.state_dict()
            template = state.get("ipu_state") or {}
            fresh = moments.to_device(self._saved_moments or {}, template, self.config.optimizer.kind, _PREFIX)
            moments.put_scale(fresh, self._saved_scale)
            self.optimizer.load_state_dict({**state, "ipu_state": fresh, "ipu_param": state.get("ipu_param") or {}})
        if self._saved_random is not None:
            self.executor.rng_state = self._saved_random
        self._saved_moments = self._saved_random = self._saved_scale = None

    def attach(self) -> None:
        """Take the IPUs for training (the first training call does so by itself)."""
        if self.executor is not None and self.executor.isCompiled():
            with self._failures():
                self._take(self.executor, ())

    def detach(self) -> None:
        """Let go of the IPUs; weights and moments come to the host."""
        for executor in (self.executor, self.evaluator):
            if executor is not None and executor.isAttachedToDevice():
                with self._failures():
                    executor.detachFromDevice()

    def close(self) -> None:
        """Free the IPUs and give the model its own class back. Never raises: it also runs after a failure."""
        for executor in (self.evaluator, self.executor):
            if executor is not None:
                with contextlib.suppress(Exception):
                    executor.destroy()
        self.executor = self.evaluator = None
        self.placement.remove()
        self._redraw.release()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """PopTorch's errors as ours. Graphcore calls some of them recoverable: the run may start again from a checkpoint."""
        try:
            yield
        except self.poptorch.RecoverableError as error:
            text = explain(str(error), self._advice)
            raise DeviceFailure(f"the IPUs failed and ask for {error.recovery_action}: {text}") from error
        except self.poptorch.Error as error:
            raise RunError(f"PopTorch refused the step or failed in it: {explain(str(error), self._advice)}") from error

    def _advice(self) -> str:
        return out_of_memory(self.config)

    # -- state -----------------------------------------------------------------------------------------------------------
    def sync_to_host(self) -> Dict[str, torch.Tensor]:
        """Weights by name, float32 on the host. RunError if one is not finite: such a checkpoint would be no way back."""
        with self._failures():
            if self.executor is not None and self.executor.isCompiled():
                self.executor.copyWeightsToHostIfNeeded()
        weights = {}
        for name, value in self.step.state_dict().items():
            if not isinstance(value, torch.Tensor):
                continue
            value = value.detach()
            weights[name[len(_PREFIX) :]] = value.float() if value.is_floating_point() else value
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise RunError(f"{name[len(_PREFIX) :]} is not finite after step {self.update}.")
        self._guard.note()
        return weights if self.world.first else {}

    def optimizer_state(self) -> Dict[str, Any]:
        """Moments by parameter name in torch's terms; what PopTorch keeps to itself is left out, and said."""
        groups = [{key: value for key, value in group.items() if key != "params"} for group in self.optimizer.param_groups]
        for group, names in zip(groups, self._names):
            group["params"] = list(names)
        names = [name for group in self._names for name in group]
        kind = self.config.optimizer.kind
        if self._saved_moments is not None:  # loaded, and not on the device yet
            return {"state": self._saved_moments, "groups": groups} if self.world.first else {}
        if self.update == 0 or (kind == "sgd" and not self.config.optimizer.momentum):
            return {"state": {}, "groups": groups} if self.world.first else {}
        with self._failures():
            shown = self.optimizer.state_dict().get("ipu_state")
        state, missing = moments.to_host(shown, names, kind, self.update, _PREFIX)
        if missing:
            self.say(
                f"warning: PopTorch does not show the optimizer's moments of {len(missing)} tensors ({missing[0]}, …): a run "
                "that goes on from this checkpoint begins them anew."
            )
        return {"state": state, "groups": groups} if self.world.first else {}

    def load_optimizer_state(self, state: Dict[str, Any]) -> None:
        """Take over what any engine's `optimizer_state` returned. CheckpointError for other groups."""
        theirs = [list(group["params"]) for group in state.get("groups", [])]
        if theirs != self._names:
            raise CheckpointError(
                f"optimizer.pt holds {len(theirs)} parameter groups of {sum(map(len, theirs))} tensors, this config makes "
                f"{len(self._names)} of {sum(map(len, self._names))} with another membership."
            )
        self._saved_moments = {name: dict(entry) for name, entry in state["state"].items() if entry}

    def state_dict(self) -> Dict[str, Any]:
        """Updates made, the device's random state and what automatic loss scaling came to, as plain JSON."""
        random, scale = self._saved_random, self._saved_scale
        if self.executor is not None and self.executor.isCompiled():
            random = [int(word) for word in self.executor.rng_state]
            if self.config.ipu.loss_scaling == "auto":
                with self._failures():
                    scale = moments.scale_of(self.optimizer.state_dict().get("ipu_state"))
        return {"update": self.update, "scale": None, "ipu": {"rng": random, "scale": scale}}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Take over what any engine's `state_dict` returned."""
        self.update = int(state["update"])
        own = state.get("ipu") or {}
        self._saved_random, self._saved_scale = own.get("rng"), own.get("scale")
        draw = self._redraw.due(max(0, self.update - 1))  # the one that stood when it was saved
        if draw is not None:
            self.detach()  # whoever attaches next sends it
            self._redraw.write(draw)


def _names_in(optimizer: torch.optim.Optimizer, model: nn.Module) -> List[List[str]]:
    """The names of the model's parameters in each group."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [[by_id[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _tensors(batch: Batch) -> Any:
    """int32 and float32, which is what the device has: int64 would be narrowed on its side."""
    arrays = [np.ascontiguousarray(array) for array in batch]
    for array in arrays:
        if array.dtype not in (np.int32, np.float32):
            raise ConfigError(f"batches are int32 or float32, this one is {array.dtype}", key="data")
    return tuple(torch.from_numpy(array) for array in arrays)
