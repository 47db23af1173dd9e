"""DDP and FSDP around one TrainStep, and full-size states out of (and back into) whatever part of them a process holds.

The whole step is ONE FSDP unit: weights are gathered for the step, gradients and optimizer state live in shards. Wrapping layer
by layer would gather again inside the backward pass, where a reversible stack rebuilds its inputs.
"""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist
from torch import nn

from ipu_lean import _compat
from ipu_lean.config import Config
from ipu_lean.errors import CheckpointError, EnvironmentProblem
from ipu_lean.train.world import World


def strategy_name(config: Config, world: World) -> str:
    """`single`, `ddp` or `fsdp`: what the configuration says, for as many processes as there are (torchrun decides that)."""
    if world.size == 1:
        return "single"
    return "ddp" if config.train.strategy == "auto" else config.train.strategy


def wrap(step: nn.Module, strategy: str, world: World) -> nn.Module:
    """`step` itself ("single"), or inside DDP or FSDP. EnvironmentProblem where this torch has no FSDP for the device."""
    if strategy == "single":
        return step
    if strategy == "ddp":
        ids = [world.device.index] if world.device.type == "cuda" else None
        return _compat.data_parallel(step, ids)
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    try:
        _probe_reduce_scatter(world)
        return FullyShardedDataParallel(
            step, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True, device_id=world.device
        )
    except (RuntimeError, AttributeError) as error:
        if world.device.type != "cpu":
            raise
        raise EnvironmentProblem(
            f"torch {torch.__version__} cannot shard on CPU ({str(error).splitlines()[0]}). Use `train.strategy: ddp` or a newer "
            "torch."
        ) from error


def _probe_reduce_scatter(world: World) -> None:
    """FSDP meets this operation only in its first backward pass; ask for it now, where the error can still be explained."""
    source = torch.zeros(world.size, device=world.device)
    _compat.reduce_scatter(torch.zeros(1, device=world.device), source)


def no_sync(module: nn.Module) -> ContextManager[Any]:
    """Within it, gradients are accumulated without being exchanged."""
    return module.no_sync() if hasattr(module, "no_sync") else contextlib.nullcontext()


class Shards:
    """Names and full shapes of a model's parameters, noted before it is wrapped; turns shards into full tensors and back."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.world, self.sharded = model, World(), False
        self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        first: Dict[int, str] = {}
        self.ties: Dict[str, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if first.setdefault(id(parameter), name) != name:
                self.ties[name] = first[id(parameter)]

    def bind(self, world: World, sharded: bool) -> None:
        """After wrapping: which processes hold the parts."""
        self.world, self.sharded = world, sharded
        if sharded:
            local = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
            self.counts: List[Dict[str, int]] = world.gather(local)

    def full(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """The full tensor, on the host, of which `local` is this process's part; `name` tells how parts are laid out."""
        if not self.sharded:
            return local.detach().cpu()
        longest = max(count[name] for count in self.counts)
        padded = torch.zeros(longest, dtype=local.dtype, device=self.world.device)
        padded[: local.numel()] = local.detach().reshape(-1)
        parts = [torch.empty_like(padded) for _ in range(self.world.size)]
        dist.all_gather(parts, padded)
        return torch.cat([part[: count[name]].cpu() for part, count in zip(parts, self.counts)]).view(self.shapes[name])

    def part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This process's part of a full tensor, on its device."""
        if not self.sharded:
            return full.to(self.world.device)
        start = sum(count[name] for count in self.counts[: self.world.rank])
        return full.reshape(-1)[start : start + self.counts[self.world.rank][name]].to(self.world.device)

    def weights(self) -> Dict[str, torch.Tensor]:
        """Full weights and buffers by name; empty on every process but the first."""
        if not self.sharded:
            return {
                name: value.detach().cpu() for name, value in self.model.state_dict().items() if isinstance(value, torch.Tensor)
            }
        state = {name: self.full(name, parameter) for name, parameter in self.model.named_parameters()}
        state.update({name: state[first] for name, first in self.ties.items()})
        known = set(state)
        for name, value in self.model.state_dict().items():
            if name not in known and isinstance(value, torch.Tensor):
                state[name] = value.detach().cpu()
        return state if self.world.first else {}


def optimizer_state(optimizer: torch.optim.Optimizer, shards: Shards) -> Dict[str, Any]:
    """State and groups by parameter name, in full size; empty on every process but the first."""
    names = {id(parameter): name for name, parameter in shards.model.named_parameters()}
    groups, local = [], {}
    for group in optimizer.param_groups:
        groups.append({key: value for key, value in group.items() if key != "params"})
        groups[-1]["params"] = [names[id(parameter)] for parameter in group["params"]]
        for parameter in group["params"]:
            local[names[id(parameter)]] = dict(optimizer.state.get(parameter, {}))
    kinds = {name: {key: _kind(value) for key, value in entry.items()} for name, entry in local.items()}
    state: Dict[str, Dict[str, Any]] = {}
    for name, keys in _merged(shards.world.gather(kinds) if shards.sharded else [kinds]).items():
        state[name] = {}
        for key, (kind, dtype, plain) in keys.items():
            value = local[name].get(key)
            if kind == "part":
                value = torch.zeros(0, dtype=dtype) if value is None else value
                state[name][key] = shards.full(name, value)
            else:
                state[name][key] = plain
    return {"state": state, "groups": groups} if shards.world.first else {}


def _kind(value: Any) -> Tuple[str, Optional[torch.dtype], Any]:
    """("part", dtype, None) for a tensor laid out like its parameter, ("whole", None, value) for a counter or plain value."""
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return "part", value.dtype, None
    return "whole", None, value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _merged(found: List[Dict[str, Dict[str, Any]]]) -> Dict[str, Dict[str, Any]]:
    """Kinds over all processes: one that holds no element of a parameter has no state for it."""
    merged: Dict[str, Dict[str, Any]] = {name: {} for name in found[0]}
    for one in found:
        for name, keys in one.items():
            merged[name].update(keys)
    return merged


def load_optimizer_state(optimizer: torch.optim.Optimizer, shards: Shards, saved: Dict[str, Any]) -> None:
    """Take over saved state. Settings of the groups stay those of the configuration; only their membership must agree
    (CheckpointError).
    """
    by_id = {id(parameter): name for name, parameter in shards.model.named_parameters()}
    mine = [[by_id[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    theirs = [list(group["params"]) for group in saved.get("groups", [])]
    if mine != theirs:
        raise CheckpointError(
            f"optimizer.pt holds {len(theirs)} parameter groups of {sum(map(len, theirs))} tensors, this config makes "
            f"{len(mine)} of {sum(map(len, mine))} with another membership."
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            entry = saved["state"].get(by_id[id(parameter)], {})
            if not entry or (shards.sharded and parameter.numel() == 0):
                continue
            optimizer.state[parameter] = {key: _restored(value, by_id[id(parameter)], shards) for key, value in entry.items()}


def _restored(value: Any, name: str, shards: Shards) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # A copy: the optimizer updates its state in place. Counters stay where torch keeps them, on the host.
    return shards.part(name, value).clone() if value.dim() > 0 else value.clone()
