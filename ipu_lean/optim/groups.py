"""Parameter groups under muP: how learning rate, decay and eps follow from a tensor's role.

With m_in, m_out and d = depth_mult of the role (all 1 under the standard parametrisation):

    Adam family   lr     hidden 1/m_in; all other kinds 1                                   (Tensor Programs V, table 8)
                  eps    d / m, m = m_in for a readout, m_out for all others: the scale at which gradients shrink with width
    SGD family    lr     hidden m_out/m_in; embedding, input, vector m_out; readout m_in; all times 1/d
    decay         coupled: 1/lr multiplier, so that lr x decay is the same at every width
                  independent: 1/(lr x lr multiplier): a step takes decay x schedule off the weight, whatever lr and width
                  unscaled: 1 (mup's `decoupled_wd`, for optimizers whose decay is not multiplied by lr)

The depth rule is CompleteP's with alpha = 1 (Dey et al., arXiv 2505.01618): Adam's lr needs no depth factor, eps does. They give
no rule for SGD; 1/d follows from the gradient inside a branch being d times smaller, and gives steps that scale as Adam's do.
"""
from __future__ import annotations

import math
import numbers
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Tuple

from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.mup import Role

FAMILIES = ("adam", "sgd")
DECAYS = ("coupled", "independent", "unscaled")
INDEPENDENT_LIMIT = 0.05
NO_PARAMETERS = "is it an exhausted generator, or a model without parameters?"


class Multipliers(NamedTuple):
    """Factors on a base model's settings for one tensor. `decay` is the coupled rule's."""

    lr: float
    decay: float
    eps: float


def multipliers(role: Role, family: str) -> Multipliers:
    """The factors of the module's table for one role; `family` is "adam" (entrywise normalised: RMSprop, LAMB … too) or "sgd"."""
    if family == "adam":
        lr = 1.0 / role.m_in if role.kind == "hidden" else 1.0
        return Multipliers(lr, 1.0 / lr, role.depth_mult / (role.m_in if role.kind == "readout" else role.m_out))
    if family == "sgd":
        lr = {"hidden": role.m_out / role.m_in, "readout": role.m_in}.get(role.kind, role.m_out) / role.depth_mult
        return Multipliers(lr, 1.0 / lr, 1.0)
    raise ConfigError(f"an optimizer's family is one of {', '.join(FAMILIES)}", key="family", value=family)


def mu_groups(
    named_params: Iterable[Tuple[str, nn.Parameter]],
    roles: Mapping[str, Role],
    *,
    family: str,
    lr: float,
    weight_decay: float,
    eps: Optional[float] = None,
    decay_vectors: bool = False,
    decay: str = "coupled",
) -> List[Dict[str, Any]]:
    """Parameter groups, one per kind and set of multipliers, in the order in which `named_params` first shows each.

    Each group has `params`, `lr`, `weight_decay`, `eps` (unless `eps` is None), and three plain keys that torch and PopTorch
    carry along unread: `lr_mult`, `initial_lr` (= lr x lr_mult, what schedules multiply) and `kind`. A parameter that
    comes twice (tied) is taken once, under whichever of its names has a role.

    Args:
        lr, weight_decay, eps: as they hold at the base width.
        decay_vectors: whether tensors of one axis or none (biases, norm gains) decay.
        decay: "coupled", "independent" or "unscaled", see above.
    Raises:
        ConfigError: no parameters; one without a role; lr a tensor or not a number; a decay that cannot be meant.
    """
    lr, weight_decay = plain_number("lr", lr), plain_number("weight_decay", weight_decay)
    _check_decay(decay, family, lr, weight_decay)
    groups: Dict[Tuple[Any, ...], Dict[str, Any]] = {}
    for name, parameter in named_once(named_params, roles):
        role = roles[name]
        mult = multipliers(role, family)
        group_lr = lr * mult.lr
        own = {"lr": group_lr, "weight_decay": 0.0 if role.kind == "vector" and not decay_vectors else weight_decay}
        own["weight_decay"] *= {"coupled": mult.decay, "unscaled": 1.0}.get(decay, 1.0 / group_lr if group_lr else 0.0)
        if eps is not None:
            own["eps"] = plain_number("eps", eps) * mult.eps
        # By multipliers, not by values: the layout, and with it a saved state's, stays when lr, decay or eps are changed.
        key = (role.kind,) + mult
        if key not in groups:
            groups[key] = {"params": [], **own, "lr_mult": mult.lr, "initial_lr": group_lr, "kind": role.kind}
        groups[key]["params"].append(parameter)
    if not groups:
        raise ConfigError("the optimizer was given no parameters", suggestion=NO_PARAMETERS)
    return list(groups.values())


def named_once(
    named_params: Iterable[Tuple[str, nn.Parameter]], roles: Mapping[str, Role]
) -> List[Tuple[str, nn.Parameter]]:
    """Each parameter once, in order of first appearance, under its first name that has a role.

    Raises:
        ConfigError: a parameter none of whose names has a role.
    """
    names: Dict[int, List[str]] = {}
    parameters: Dict[int, nn.Parameter] = {}
    for name, parameter in named_params:
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    result = []
    for identity, parameter in parameters.items():
        known = [name for name in names[identity] if name in roles]
        if not known:
            raise ConfigError(
                f"parameter `{names[identity][0]}` of shape {tuple(parameter.shape)} has no role: its learning rate is unknown",
                suggestion="compute roles after the whole model is built, and name parameters as `model.named_parameters()` does",
            )
        result.append((known[0], parameter))
    return result


def plain_number(key: str, value: Any) -> float:
    """`value` as a float.

    Raises:
        ConfigError: a tensor, not a number, negative, or not finite.
    """
    if hasattr(value, "detach"):
        raise ConfigError(
            f"{key} is a tensor; every group needs its own number, and groups that share one tensor all follow the last change",
            key=key,
            suggestion=f"give {key}.item()",
        )
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value) or value < 0:
        raise ConfigError(f"{key} must be a finite number, 0 or more", key=key, value=value)
    return float(value)


def _check_decay(decay: str, family: str, lr: float, weight_decay: float) -> None:
    if decay not in DECAYS:
        raise ConfigError(f"must be one of {', '.join(DECAYS)}", key="mup.decay", value=decay)
    if decay == "independent" and weight_decay > INDEPENDENT_LIMIT:
        raise ConfigError(
            f"independent decay takes this share off every weight per update; more than {INDEPENDENT_LIMIT:g} leaves nothing",
            key="optimizer.weight_decay",
            value=weight_decay,
            suggestion=f"{lr * weight_decay:g} decays the base model as coupled decay of {weight_decay:g} does",
        )
