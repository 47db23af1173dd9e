"""A compiled model on the emulated device: its own weights, optimizer state and random numbers; runs the replayed graph.

Batches nest as [device iterations, accumulation, replicas, micro-batch] (popart:docs/popart/glossary.rst:47).
"""
from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

from . import enums, update
from .anchors import Anchors
from .anchors import names as anchor_names
from .errors import Error
from .half import rounding
from .lossscale import STATE, AutomaticLossScale, watching
from .optimconvert import Converted
from .options import Options
from .outputs import Outputs
from .trace import Trace


class Plan(NamedTuple):
    """The numbers of one call: micro-batches follow one another as iterations x accumulation x replicas."""

    iterations: int
    accumulation: int
    replicas: int
    group: int
    orthogonal: bool

    @property
    def input_groups(self) -> int:
        return self.replicas // self.group

    @property
    def micro_batches(self) -> int:
        return self.iterations * self.accumulation * self.input_groups

    def micro_index(self, iteration: int, step: int, replica: int) -> int:
        """Which micro-batch of the host's tensor a replica reads."""
        source = replica % self.input_groups if self.orthogonal else replica // self.group
        return (iteration * self.accumulation + step) * self.input_groups + source


class Executable:
    """What `compile` leaves on the device.

    Args:
        groups: for each optimizer group, the names of its parameters; trainable parameters in none get the defaults.
    """

    def __init__(self, trace: Trace, options: Options, training: bool, host: Dict[str, torch.Tensor],
                 optimizer: Optional[Converted], groups: Sequence[Sequence[str]]) -> None:
        self.trace, self.options, self.training = trace, options, training
        settings = options._popart.options
        self.graph = trace.compiled(settings.get("partialsTypeMatMuls") == "half")
        self.plan = Plan(options.device_iterations, options.Training.gradient_accumulation if training else 1,
                         options.replication_factor, options.input_group_size,
                         options.input_cgt == enums.CommGroupType.Orthogonal)
        self.parameters: Dict[str, torch.Tensor] = {}
        self.buffers: List[Dict[str, torch.Tensor]] = []
        self.written = set(trace.written())
        self.writes_inputs = trace.writes_inputs()
        self.trainable = [name for name in trace.parameters if training and host[name].requires_grad]
        if self.written & set(self.trainable):
            raise Error(f"Trainable parameters are written in place by the model: {sorted(self.written & set(self.trainable))}")
        self.optimizer = optimizer
        self.groups = [list(group) for group in groups]
        self.state: Dict[str, Dict[str, Any]] = {name: {} for name in self.trainable}
        self.outputs = [node for node in trace.outputs if node is not None]
        self.load(host)
        narrow = any(parameter.dtype == torch.float16 for parameter in self.parameters.values())
        automatic = training and AutomaticLossScale.enabled(settings)
        self.automatic = AutomaticLossScale(settings, narrow) if automatic else None

    # -- weights ---------------------------------------------------------------------------------------------------------
    def load(self, host: Dict[str, torch.Tensor]) -> None:
        """Copy the host's weights to the device (float64 as float32)."""
        for name in self.trace.parameters:
            value = _device_copy(host[name])
            value.requires_grad_(name in self.trainable)
            self.parameters[name] = value
        replicas = self.plan.replicas if self.written & set(self.trace.buffers) else 1
        self.buffers = [{name: _device_copy(host[name]) for name in self.trace.buffers} for _ in range(replicas)]

    def load_buffers(self, host: Dict[str, torch.Tensor]) -> None:
        for copy in self.buffers:
            for name, value in host.items():
                copy[name].copy_(value)

    def store(self, host: Dict[str, torch.Tensor]) -> None:
        """Copy the device's weights, and replica 0's buffers, into the host's tensors."""
        with torch.no_grad():
            for name, value in (*self.parameters.items(), *self.buffers[0].items()):
                host[name].copy_(value.detach())

    # -- a call ----------------------------------------------------------------------------------------------------------
    def anchors(self) -> Anchors:
        """A collector for one call; Error for an anchored name that is not in the graph."""
        known = anchor_names(self.trainable, [*self.trace.parameters, *self.trace.buffers])
        return Anchors(self.options, known, self.plan.iterations, self.plan.accumulation, self.plan.replicas)

    def run(self, inputs: Sequence[torch.Tensor], kept: Outputs, anchors: Anchors) -> None:
        """One call of the executor: all device iterations. `inputs` are the host's whole tensors."""
        pieces = [_split(tensor, self.plan.micro_batches) for tensor in inputs]
        with rounding(bool(self.options._popart.options.get("enableStochasticRounding"))):
            for iteration in range(self.plan.iterations):
                if self.training:
                    self._train(iteration, pieces, kept, anchors)
                else:
                    self._infer(iteration, pieces, kept)
                anchors.updated({**self.parameters, **self.buffers[0]})

    @torch.no_grad()
    def _infer(self, iteration: int, pieces: List[List[torch.Tensor]], kept: Outputs) -> None:
        for replica in range(self.plan.replicas):
            kept.add(self._micro(iteration, 0, replica, pieces)[1], replica)

    def _micro(self, iteration: int, step: int, replica: int, pieces: List[List[torch.Tensor]]) -> Tuple[Any, List[torch.Tensor]]:
        index = self.plan.micro_index(iteration, step, replica)
        batch = [piece[index].clone() if self.writes_inputs else piece[index] for piece in pieces]
        buffers = self.buffers[replica if len(self.buffers) > 1 else 0]
        return self.graph(*[self.parameters[name] for name in self.trace.parameters],
                          *[buffers[name] for name in self.trace.buffers], *batch)

    def _train(self, iteration: int, pieces: List[List[torch.Tensor]], kept: Outputs, anchors: Anchors) -> None:
        """Accumulate the micro-batches' gradients from the marked loss and step once (options.py:278-305)."""
        assert self.optimizer is not None
        scale = self.loss_scaling()
        gathered = update.Accumulator(self.parameters, self.trainable, self.optimizer, self.options, anchors.gradients)
        for step in range(self.plan.accumulation):
            for replica in range(self.plan.replicas):
                with torch.enable_grad(), watching(self.automatic):
                    loss, outputs = self._micro(iteration, step, replica, pieces)
                    kept.add(outputs, replica)
                    if loss.requires_grad:
                        loss.backward(torch.full_like(loss, scale))
                    del loss, outputs
                anchors.micro_batch(gathered.collect(), self.parameters, replica)
        gradients = gathered.result(scale)
        values = {name: self.values_of(name) for name in gradients}
        update.apply(self.parameters, gradients, self.state, self.optimizer, values)
        if self.automatic is not None:
            self.automatic.update(self._base_scale())

    def loss_scaling(self) -> float:
        """What the loss is multiplied by in the next update."""
        return self._base_scale() * (1.0 if self.automatic is None else self.automatic.factor)

    def _base_scale(self) -> float:
        return float(self.optimizer.defaults["loss_scaling"][0]) if self.optimizer is not None else 1.0

    # -- the update ------------------------------------------------------------------------------------------------------
    def values_of(self, name: str) -> Dict[str, Any]:
        """The optimizer's values for a parameter: its group's, or the defaults."""
        assert self.optimizer is not None
        for index, group in enumerate(self.groups):
            if name in group:
                return {key: entry[0] for key, entry in self.optimizer.groups[index].items()}
        return {key: entry[0] for key, entry in self.optimizer.defaults.items()}

    def set_optimizer(self, optimizer: Converted, groups: Sequence[Sequence[str]]) -> None:
        """Replace the values; Error when something that is constant would change (overview.rst:797)."""
        old = self.optimizer
        assert old is not None
        if old.kind != optimizer.kind:
            raise Error(f"The optimizer cannot change from {old.kind.name} to {optimizer.kind.name} after compilation")
        if [sorted(group) for group in groups] != [sorted(group) for group in self.groups]:
            raise Error("The tensors of the optimizer's groups cannot change after compilation")
        for name, value in old.attributes.items():
            if optimizer.attributes[name] != value:
                now = optimizer.attributes[name]
                raise Error(f"Optimizer attribute {name} cannot change after compilation ({value} to {now})")
        labels = ["defaults", *(f"group {index}" for index in range(len(old.groups)))]
        for label, before, after in zip(labels, [old.defaults, *old.groups], [optimizer.defaults, *optimizer.groups]):
            for name, (value, constant) in before.items():
                if constant != after[name][1] or (constant and value != after[name][0]):
                    raise Error(f"Optimizer value {name} of {label} is constant and cannot change after compilation ({value} to "
                                f"{after[name][0]}): pass {name} to the optimizer's constructor to make it variable")
        self.optimizer = optimizer

    # -- optimizer state -------------------------------------------------------------------------------------------------
    def read_state(self) -> Dict[str, Any]:
        """`ipu_state`: tensors by PopART's names (Accl1___weight …); `ipu_param`: the values in force."""
        tensors = {slot + name: torch.as_tensor(value).clone()
                   for name, slots in self.state.items() for slot, value in slots.items()}
        if self.automatic is not None:
            tensors[STATE] = torch.tensor(self.automatic.factor)
        assert self.optimizer is not None
        parameters = {name: entry[0] for name, entry in self.optimizer.defaults.items()}
        return {"ipu_state": tensors, "ipu_param": parameters}

    def write_state(self, state: Dict[str, Any]) -> None:
        if self.automatic is not None and STATE in state["ipu_state"]:
            self.automatic.factor = float(state["ipu_state"][STATE])
        for name in self.trainable:
            found = {key[: -len(name)]: value for key, value in state["ipu_state"].items() if key.endswith("___" + name)}
            self.state[name] = {slot: int(value) if slot == "Step___" else value.clone() for slot, value in found.items()}


def _device_copy(tensor: torch.Tensor) -> torch.Tensor:
    value = tensor.detach().as_subclass(torch.Tensor).clone(memory_format=torch.preserve_format)
    return value.float() if value.dtype == torch.float64 else value


def _split(tensor: torch.Tensor, count: int) -> List[torch.Tensor]:
    if tensor.dim() == 0:
        return [tensor] * count
    return list(tensor.split(tensor.shape[0] // count))


