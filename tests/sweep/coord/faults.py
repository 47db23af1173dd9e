"""Mistakes that people make, each put into a rig from outside: the judge is only as good as the faults that it rejects.

A fault is a function (architecture, lr, seed) -> rig; `FAULTS` names it, the diagnosis that it deserves, and who can carry it.
"""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Dict, List

import torch
from torch import nn

from ipu_lean.config import Config
from ipu_lean.sweep.coord.rig import Rig, standard
from tests.sweep.coord.architectures import BASE, Architecture

Make = Callable[[Architecture, float, int], Rig]


@dataclass(frozen=True)
class Fault:
    """`code` is the one diagnosis that must be given."""

    name: str
    code: str
    make: Make
    carried_by: Callable[[Architecture], bool] = lambda architecture: True


def of_model(change: Callable[[nn.Module, int], None]) -> Make:
    """A fault of the model: `change` breaks what was built at a width."""

    def make(architecture: Architecture, lr: float, seed: int) -> Rig:
        rig = architecture.rig(lr, seed)

        def build(size: int, number: int) -> nn.Module:
            model = rig.build(size, number)
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(size + 7 * number + seed)
                change(model, size)
            return model

        return replace(rig, build=build)

    return make


def of_optimizer(change: Callable[[nn.Module, torch.optim.Optimizer], torch.optim.Optimizer]) -> Make:
    """A fault of the optimizer: `change` breaks it, or gives another."""

    def make(architecture: Architecture, lr: float, seed: int) -> Rig:
        rig = architecture.rig(lr, seed)
        return replace(rig, optimizer=lambda model: change(model, rig.optimizer(model)))

    return make


def of_config(edit: Callable[[Config, int], Config]) -> Make:
    """A fault of the configuration."""
    return lambda architecture, lr, seed: architecture.rig(lr, seed, edit)


def hidden_names(model: nn.Module) -> List[str]:
    """Matrices inside the network: neither embedding, nor input layer, nor readout."""
    return [name for name, role in model.roles.items() if role.kind == "hidden"]


def width_mult(model: nn.Module) -> float:
    return model.rig_config.model.width / BASE


# --- the seven of the measurements that the thresholds began with ---


def without_base(config: Config, width: int) -> Config:
    """All multipliers 1, but muP's zero starts: what base shapes of None give."""
    gpt = config.model.kind == "gpt"
    mup = {"parametrization": "standard", "query_zero_init": gpt or None, "depth_rule": "completep" if gpt else "auto",
           "readout_zero_init": None if gpt and config.model.tied else True}  # fmt: skip
    return config.model_copy(update={"mup": config.mup.model_copy(update=mup)})


def moving_base(config: Config, width: int) -> Config:
    """The base is half the target at every width."""
    return config.model_copy(update={"mup": config.mup.model_copy(update={"base_width": width // 2})})


def plain_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """One rate for all."""
    lr = model.rig_config.optimizer.lr
    return torch.optim.AdamW([{"params": list(model.parameters()), "initial_lr": lr}], lr=lr)


def plain_readout(model: nn.Module, width: int) -> None:
    """No division by the width multiplier."""
    model.readout.base_width = None


def constant_init(model: nn.Module, width: int) -> None:
    """GPT-2's 0.02 at every width (here larger, to be right at the narrowest)."""
    for name, parameter in model.named_parameters():
        if name in hidden_names(model) and "query" not in name:
            parameter.normal_(0.0, BASE**-0.5)


def sqrt_attention(model: nn.Module, width: int) -> None:
    """1/sqrt(head size)."""
    for module in model.modules():
        if hasattr(module, "query"):
            module.scale = module.head_size**-0.5
        if hasattr(module, "query_key"):
            module.score_mult = 1.0  # keys of unit length: the same at every head size


# --- more ---


def large_eps(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An eps for mixed precision, the same at every width."""
    for group in optimizer.param_groups:
        group["eps"] = 1e-4
    return optimizer


def grown_embedding(model: nn.Module, width: int) -> None:
    """mup's rescaling of readouts, applied to the embedding that a tied readout is."""
    model.embedding.token.weight.mul_(width_mult(model) ** 0.5)


def lost_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """One module's rate is the base's."""
    name = hidden_names(model)[-1]
    lost = dict(model.named_parameters())[name]
    for group in list(optimizer.param_groups):
        if any(parameter is lost for parameter in group["params"]):
            group["params"] = [parameter for parameter in group["params"] if parameter is not lost]
            lr = model.rig_config.optimizer.lr
            if not group["params"]:
                optimizer.param_groups.remove(group)
            optimizer.add_param_group({**group, "params": [lost], "lr": lr, "initial_lr": lr})
    return optimizer


def one_cycle(architecture: Architecture, lr: float, seed: int) -> Rig:
    """torch's OneCycleLR, which writes one rate into all groups."""
    rig = architecture.rig(lr, seed)

    def advance(optimizer: torch.optim.Optimizer, update: int) -> None:
        if update == 0:
            optimizer.cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=20, div_factor=2.0)
        else:
            optimizer.cycle.step()

    return replace(rig, advance=advance)


def fan_in_init(model: nn.Module, width: int) -> None:
    """Kaiming's rule on the readout, or on the embedding that serves as one."""
    table = getattr(model.readout, "weight", None)
    nn.init.kaiming_normal_(model.embedding.token.weight if table is None else table)


def width_branch(model: nn.Module, width: int) -> None:
    """The branch multiplier divides by the width as well as by the depth."""
    for name, module in model.named_modules():
        if name.endswith(("attention.out.linear", "down.linear")):
            module.mult /= width_mult(model)


def bare_decay(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Learning rates follow the width, decay does not."""
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.1 if group["weight_decay"] else 0.0
    return optimizer


def scaled_twice(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Groups of muP, and an optimizer that divides by the width too."""
    for group in optimizer.param_groups:
        for key in ("lr", "initial_lr"):
            group[key] *= group["lr_mult"]
    return optimizer


def embedding_as_hidden(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The rate of embedding, input layer and readout follows the width."""
    for group in optimizer.param_groups:
        if group["kind"] in ("embedding", "input", "readout"):
            for key in ("lr", "initial_lr"):
                group[key] /= width_mult(model)
    return optimizer


def frozen(model: nn.Module, width: int) -> None:
    """Only the readout is trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("readout"))


def attends(architecture: Architecture) -> bool:
    return architecture.attends


FAULTS: Dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("standard parametrisation", "standard-parametrization", of_config(lambda config, width: standard(config))),
        Fault("no learning rate groups", "lost-lr-groups", of_optimizer(plain_optimizer)),
        Fault("base is half the width", "moving-base", of_config(moving_base)),
        Fault("base is None", "no-base", of_config(without_base)),
        Fault("plain readout", "no-readout-multiplier", of_model(plain_readout)),
        Fault("constant initialisation", "constant-init", of_model(constant_init)),
        Fault("1/sqrt(d) attention", "sqrt-attention", of_model(sqrt_attention), attends),
        Fault("eps too large", "eps-too-large", of_optimizer(large_eps)),
        Fault("tied embedding grows", "growing-embedding", of_model(grown_embedding), lambda found: found.tied),
        Fault("one group lost", "lost-lr-group", of_optimizer(lost_group)),
        Fault("scheduler flattens groups", "flattened-schedule", one_cycle),
        Fault("fan-in initialisation", "fan-in-init", of_model(fan_in_init)),
        Fault("branch follows the width", "width-dependent-multiplier", of_model(width_branch), attends),
        Fault("decay not compensated", "decay-not-compensated", of_optimizer(bare_decay)),
        Fault("rate scaled twice", "scaled-twice", of_optimizer(scaled_twice)),
        Fault("embedding scaled as hidden", "wrong-lr-group", of_optimizer(embedding_as_hidden)),
        Fault("frozen features", "frozen", of_model(frozen), lambda found: not found.tied),
    )
}
