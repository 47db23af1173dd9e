"""Group settings apart from moments: reading them by name, and loading a state without letting it change them.

`Optimizer.load_state_dict` overwrites lr, decay and eps of every group with the saved ones, so a state from another width, or
from before an override, silently undoes the parametrisation. Here settings always come from the optimizer as it was built.
"""
from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, Sequence, Tuple

import torch
from torch import nn

from ipu_lean.errors import ConfigError


def group_settings(optimizer: torch.optim.Optimizer) -> List[Dict[str, Any]]:
    """A copy of every group without its parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def settings_by_name(
    named_params: Iterable[Tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer
) -> Dict[str, Dict[str, Any]]:
    """{name: settings of its group}, for the parameters that the optimizer holds."""
    by_id: Dict[int, Dict[str, Any]] = {}
    for group, settings in zip(optimizer.param_groups, group_settings(optimizer)):
        by_id.update({id(parameter): settings for parameter in group["params"]})
    return {name: by_id[id(parameter)] for name, parameter in named_params if id(parameter) in by_id}


def restore_groups(optimizer: torch.optim.Optimizer, fresh_groups: Sequence[Mapping[str, Any]]) -> None:
    """Put back the settings of `fresh_groups` (from `mu_groups`, or `group_settings` before a load); moments stay.

    Raises:
        ConfigError: another number of groups, or of parameters in one of them (where `fresh_groups` carry parameters).
    """
    held = optimizer.param_groups
    sizes = [len(group["params"]) for group in held]
    if len(fresh_groups) != len(held) or all("params" in group for group in fresh_groups):
        _same_layout(sizes, [len(group.get("params", ())) for group in fresh_groups])
    for group, fresh in zip(held, fresh_groups):
        group.update({key: value for key, value in fresh.items() if key != "params"})


def load_state(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """`optimizer.load_state_dict(saved)`, moments and step counts only; every group keeps the settings it was built with.

    `optimizer` must be freshly built, or hold unscheduled rates: apply the schedule for the next update after loading.

    Raises:
        ConfigError: another number of groups or parameters, another kind of optimizer, or a moment whose shape is not its
            parameter's (another width).
    """
    held, groups = optimizer.param_groups, saved["param_groups"]
    _same_layout([len(group["params"]) for group in held], [len(group["params"]) for group in groups])
    kinds = [{key for key in ("betas", "momentum", "alpha") if key in group} for group in (groups[0], held[0])]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"the saved optimizer state is of another kind of optimizer (it has {sorted(kinds[0])}, this one {sorted(kinds[1])})",
            key="optimizer.kind",
            suggestion="resume with the optimizer that the checkpoint was written with",
        )
    for group, own in zip(groups, held):
        for index, parameter in zip(group["params"], own["params"]):
            for key, value in saved["state"].get(index, {}).items():
                if torch.is_tensor(value) and value.dim() and tuple(value.shape) != tuple(parameter.shape):
                    raise ConfigError(
                        f"the saved optimizer state is of another model: {key} of shape {tuple(value.shape)} "
                        f"for a parameter of shape {tuple(parameter.shape)}",
                        suggestion="resume with the width, depth and vocabulary that the checkpoint was written with",
                    )
    fresh = group_settings(optimizer)
    # Other keys (PopTorch's own state) pass through untouched.
    patched = [{**settings, "params": list(group["params"])} for settings, group in zip(fresh, groups)]
    optimizer.load_state_dict({**saved, "param_groups": patched})


def _same_layout(held: Sequence[int], given: Sequence[int]) -> None:
    if list(held) != list(given):
        raise ConfigError(
            f"the saved optimizer state has groups of {list(given)} parameters, this optimizer of {list(held)}",
            suggestion="resume with the model, parametrisation and optimizer that the checkpoint was written with",
        )
