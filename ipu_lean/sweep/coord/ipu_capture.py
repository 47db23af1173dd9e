"""One run of one size on IPUs or their emulator: activations leave the device as further outputs of the traced training step."""

from __future__ import annotations

import math
from typing import Any, Dict, Tuple

import torch
from torch import nn

from ipu_lean.config import Config
from ipu_lean.ipu import PopTrainStep, load_poptorch, make_optimizer, make_options, place, to_precision
from ipu_lean.mup.figures import Figures
from ipu_lean.sweep.coord.capture import Track, Values, head, rates
from ipu_lean.sweep.coord.rig import Rig
from ipu_lean.sweep.coord.signature import decay_of, signature_of
from ipu_lean.sweep.coord.watch import Watch


class WatchedStep(PopTrainStep):
    """(inputs, labels) -> (loss, sums, then every watched module's result for the micro-batch, in order of execution)."""

    def __init__(self, model: nn.Module, poptorch: Any) -> None:
        super().__init__(model, poptorch)
        self.watch = Watch(model)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, ...]:  # type: ignore[override]
        """As `PopTrainStep`, with more outputs."""
        self.watch.start()
        hidden = self.model.hidden(inputs)
        head(self.model)(hidden.detach())
        seen = tuple(tensor.detach().float() for tensor in self.watch.take())
        loss, sums = self.model.loss(hidden, labels)
        return (self._mark(loss.float()), sums, *seen)


def run(rig: Rig, size: int, seed: int, steps: int, signatures: bool = True) -> Figures:
    """As `capture.run`: the executor's `steps` + 1 calls give the values, copied weights the updates."""
    assert rig.configs is not None, "an IPU needs the configuration"
    config = undecayed(rig.configs(size))
    poptorch = load_poptorch(config.device)
    fresh = rig.build(size, seed)
    inputs, labels = rig.batch(seed)
    found = Figures(axis=rig.axis, family=rig.family)
    decays: Dict[str, float] = {}
    if signatures:  # of the weights, before a device has them
        decays = decay_of(rig, fresh) if rig.decays else {}
        found.signatures = [signature_of(fresh, inputs, size, seed)]
    model = to_precision(rig.build(size, seed), config).train()
    step = WatchedStep(model, poptorch)
    placement = place(model, config, poptorch)
    optimizer = make_optimizer(model, config, poptorch)
    track, values = Track(model, optimizer), Values(size, seed)
    executor = poptorch.trainingModel(step, options=make_options(config, poptorch).train, optimizer=optimizer)
    names = [name for name, _ in model.named_parameters()]
    try:
        for update in range(steps + 1):
            rig.advance(optimizer, update)
            if update:
                executor.setOptimizer(optimizer)
            loss, _, *seen = executor(inputs, labels)
            values.take(update, step.watch.names, seen, step.watch.role)
            if not math.isfinite(float(loss.float().mean())):
                found.diverged.append((size, seed, update))
                break
            if update < steps:
                executor.copyWeightsToHost()
                weights = dict(model.named_parameters())
                track.update(update + 1, {name: weights[name].detach() for name in names})
        found.tensors = track.rows(size, seed, rates(model, optimizer), decays)
    finally:
        executor.destroy()
        placement.remove()
        step.watch.release()
    found.coordinates = values.rows
    return found


def undecayed(config: Config) -> Config:
    """The configuration without weight decay, which is measured by itself."""
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"weight_decay": 0.0})})
