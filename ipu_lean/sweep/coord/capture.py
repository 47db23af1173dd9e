"""One run of one size on the CPU or a GPU: every module's values at every step, and every tensor's updates."""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Sequence, Set

import torch
from torch import nn

from ipu_lean.config.layout import IPU_DEVICES
from ipu_lean.mup.figures import Coordinate, Figures, TensorFigure
from ipu_lean.sweep.coord.rig import Rig
from ipu_lean.sweep.coord.signature import decay_of, signature_of
from ipu_lean.sweep.coord.watch import Watch

Say = Callable[[str], None]


def measure(
    rig: Rig, sizes: Sequence[int], steps: int, seeds: int = 1, say: Say = lambda text: None, signatures: bool = True
) -> Figures:
    """All figures of a rig: `steps` weight updates at every size with every seed, on each seed's one batch.

    Args:
        signatures: also what is measured before training (attention scores, readout, decay).
    """
    found = Figures(axis=rig.axis, family=rig.family)
    one: Any = run
    if rig.configs is not None and rig.configs(sizes[0]).device in IPU_DEVICES:
        from ipu_lean.sweep.coord import ipu_capture

        one = ipu_capture.run
    for size in sizes:
        for seed in range(seeds):
            found.extend(one(rig, size, seed, steps, signatures))
            say(f"{rig.axis} {size}, seed {seed + 1} of {seeds}")
    return found


def run(rig: Rig, size: int, seed: int, steps: int, signatures: bool = True) -> Figures:
    """One run: values at steps 0 … `steps`, weights after each update. A loss that is not finite ends it."""
    model = rig.build(size, seed).to(rig.device).train()
    inputs, labels = (tensor.to(rig.device) for tensor in rig.batch(seed))
    optimizer = rig.optimizer(model)
    without_decay(optimizer)
    found = Figures(axis=rig.axis, family=rig.family)
    track = Track(model, optimizer)
    watch = Watch(model)
    values = Values(size, seed)
    for step in range(steps + 1):
        watch.start()
        hidden = model.hidden(inputs)  # type: ignore[operator]
        with torch.no_grad():
            head(model)(hidden.detach())
        values.take(step, watch.names, watch.take(), watch.role)
        watch.start()
        loss, _ = model.loss(hidden, labels)  # type: ignore[operator]
        if not math.isfinite(loss.item()):
            found.diverged.append((size, seed, step))
            break
        if step == steps:
            break
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        rig.advance(optimizer, step)
        optimizer.step()
        track.update(step + 1, {name: parameter.detach() for name, parameter in model.named_parameters()})
    watch.release()
    found.coordinates = values.rows
    decays: Dict[str, float] = {}
    if signatures:
        fresh = rig.build(size, seed).to(rig.device)
        decays = decay_of(rig, fresh) if rig.decays else {}
        found.signatures = [signature_of(fresh, inputs, size, seed)]
    found.tensors = track.rows(size, seed, rates(model, optimizer), decays)
    return found


def head(model: nn.Module) -> nn.Module:
    """The readout."""
    return [block.module for block in model.blocks() if block.kind == "head"][-1]  # type: ignore[operator]


def without_decay(optimizer: torch.optim.Optimizer) -> None:
    """Decay is measured by itself; mixed with the gradient's part it would blur both."""
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0


def without_gradient(model: nn.Module) -> Set[str]:
    """Parameters whose gradient is nothing but rounding: a key's bias moves all scores of a query alike, which softmax undoes,
    unless keys are turned by their positions.
    """
    found = set()
    for path, module in model.named_modules():
        if hasattr(module, "key") and getattr(module, "positions", 0) is None:
            found |= {f"{path}.key.{name}" for name, _ in module.key.named_parameters() if name.endswith("bias")}
    return found


def rates(model: nn.Module, optimizer: torch.optim.Optimizer) -> Dict[str, float]:
    """Each tensor's present learning rate; 0 for one that the optimizer does not hold."""
    found = {id(parameter): float(group["lr"]) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: found.get(id(parameter), 0.0) for name, parameter in model.named_parameters()}


def rms(tensor: torch.Tensor) -> float:
    """Root mean square over all entries, in float64."""
    return float(tensor.detach().double().square().mean().sqrt())


def moved_rms(change: torch.Tensor) -> float:
    """Root mean square of the entries that are not zero: tokens that do not occur and units that are dead, a few more or less by
    chance, have no part in an update's size.
    """
    moved = change[change != 0]
    return rms(moved) if moved.numel() else 0.0


class Values:
    """Statistics of every watched tensor against its own value at step 0."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed, self.rows = size, seed, []
        self._start: Dict[str, torch.Tensor] = {}

    def take(self, step: int, names: Sequence[str], tensors: Sequence[torch.Tensor], role: Callable[[str], str]) -> None:
        """Add one step's rows."""
        for name, tensor in zip(names, tensors):
            value = tensor.detach().float()
            start = self._start.setdefault(name, value.clone())
            change = value - start
            self.rows.append(
                Coordinate(
                    self.size, self.seed, step, name, role(name),
                    float(value.abs().mean()), rms(value), float(change.abs().mean()), rms(change), float(change.double().std()),
                )
            )  # fmt: skip


class Track:
    """The first and the last update of every tensor."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.last = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.last.items()}
        self.init = {name: rms(tensor) for name, tensor in self.last.items()}
        self.built = rates(model, optimizer)
        roles = getattr(model, "roles", {})
        self.labels = {name: roles[name].kind if name in roles else "" for name in self.last}
        self._idle = without_gradient(model)
        self.first: Dict[str, float] = {}
        self.first_step: Dict[str, int] = {}
        self.latest: Dict[str, float] = {}

    def update(self, step: int, weights: Dict[str, torch.Tensor]) -> None:
        """Note what update `step` (from 1) did."""
        for name, weight in weights.items():
            moved = moved_rms(weight - self.last[name])
            if moved and name not in self.first and name not in self._idle:
                self.first[name], self.first_step[name] = moved, step
            self.latest[name] = moved
            self.last[name] = weight.clone()

    def rows(self, size: int, seed: int, rate: Dict[str, float], decays: Dict[str, float]) -> List[TensorFigure]:
        """One row a tensor, in the model's order."""
        return [
            TensorFigure(
                size, seed, name, shape, self.init[name], self.first.get(name, 0.0), self.first_step.get(name, 0),
                self.latest.get(name, 0.0), self.built.get(name, 0.0), rate.get(name, 0.0), decays.get(name), self.labels[name],
            )
            for name, shape in self.shapes.items()
        ]  # fmt: skip
