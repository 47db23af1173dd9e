"""Moments between PopTorch's optimizer state and the host's checkpoint format, so that a run can change devices.

PopART names the tensors of a parameter NAME (as it is called in the traced model) `Accl1___NAME`, `Accl2___NAME`, `Step___NAME`;
a state_dict of `poptorch.optim` holds them as `ipu_state`, beside the values in force as `ipu_param`. torch keeps the same
numbers as `exp_avg`, `exp_avg_sq`, `step`, or `momentum_buffer`.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Optional, Tuple

import torch

ADAM = {"exp_avg": "Accl1___", "exp_avg_sq": "Accl2___"}
SGD = {"momentum_buffer": "Accl1___"}
STEP = "Step___"
SCALE = "lossScaleUpdateFactor"
"""PopART's name for what automatic loss scaling multiplies the loss scale by."""

State = Dict[str, Dict[str, Any]]


def slots(kind: str) -> Dict[str, str]:
    """torch's names of the moments and PopART's prefixes, for `adamw`, `adam` or `sgd`."""
    return SGD if kind == "sgd" else ADAM


def to_host(device_state: Mapping[str, Any], names: List[str], kind: str, updates: int, prefix: str) -> Tuple[State, List[str]]:
    """({name: {key: tensor}} as torch's optimizers have it, names of parameters whose moments PopTorch did not show).

    Args:
        device_state: `optimizer.state_dict()["ipu_state"]` of a `poptorch.optim` optimizer; None before the first call.
        names: the host's parameter names. prefix: what the traced model puts before them.
        updates: made so far; stands in for a step count that is not shown.
    """
    shown = device_state or {}
    state: State = {}
    missing: List[str] = []
    for name in names:
        found = {key: shown.get(slot + prefix + name) for key, slot in slots(kind).items()}
        if any(value is None for value in found.values()):
            missing.append(name)
            continue
        state[name] = {key: torch.as_tensor(value).detach().float().clone() for key, value in found.items()}
        if kind != "sgd":
            step = shown.get(STEP + prefix + name)
            made = updates if step is None else int(torch.as_tensor(step).reshape(-1)[0])
            state[name]["step"] = torch.tensor(float(made))
    return state, missing


def to_device(saved: State, template: Mapping[str, Any], kind: str, prefix: str) -> Dict[str, Any]:
    """`ipu_state` with the host's moments in it.

    Args:
        saved: {name: {key: tensor}} in torch's names.
        template: the device's own `ipu_state`, whose types and other tensors stay; may be empty.
    """
    made = dict(template)
    for name, entry in saved.items():
        for key, slot in slots(kind).items():
            if isinstance(entry.get(key), torch.Tensor):
                made[slot + prefix + name] = _like(made.get(slot + prefix + name), entry[key])
        if kind != "sgd" and "step" in entry:
            made[STEP + prefix + name] = _like(made.get(STEP + prefix + name), torch.as_tensor(entry["step"]))
    return made


def _like(old: Any, new: torch.Tensor) -> torch.Tensor:
    """`new` in the type and shape that the device has for it."""
    if isinstance(old, torch.Tensor):
        return new.detach().to(old.dtype).reshape(old.shape).clone()
    return new.detach().clone()


def scale_of(device_state: Optional[Mapping[str, Any]]) -> Optional[float]:
    """The factor that automatic loss scaling has come to; None if PopTorch does not show it."""
    shown = (device_state or {}).get(SCALE)
    return None if shown is None else float(torch.as_tensor(shown).reshape(-1)[0])


def put_scale(device_state: Dict[str, Any], factor: Optional[float]) -> None:
    """Put back what `scale_of` returned, where there is such a tensor."""
    if factor is not None and SCALE in device_state:
        device_state[SCALE] = _like(device_state[SCALE], torch.tensor(factor))
