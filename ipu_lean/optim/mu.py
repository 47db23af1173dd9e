"""MuAdam, MuAdamW, MuSGD: mup's call signature, our roles.

    MuAdam(model.parameters(), lr=1e-3)                      parameters that carry `infshape` (ours or the mup package's)
    MuAdamW(model, lr=1e-3)                                  a model with `.roles`, or whose parameters carry `infshape`
    MuAdam(model.named_parameters(), roles=roles, impl=poptorch.optim.Adam, lr=1e-3, loss_scaling=512.0)
    MuSGD([{"params": ..., "lr": ...}, ...], lr=0.1)         groups of any of these; their own options stay

Where mup 1.0.0 is right the groups have its numbers. Different on purpose: Adam's eps follows the width; AdamW keeps its own
default decay (mup makes it 0); the caller's groups are left as they were; there are no empty groups; a tensor as lr is refused.
"""
from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Tuple, Type, Union

import torch
from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.mup import Role, role_of_infshape
from ipu_lean.optim.groups import NO_PARAMETERS, mu_groups, plain_number

Params = Union[nn.Module, Iterable[Any]]
Named = List[Tuple[str, nn.Parameter]]
_ADAM_LIKE = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "LAMB", "Lion", "AnyPrecisionAdamW")
_SGD_LIKE = ("SGD", "ASGD")


def MuAdam(
    params: Params,
    impl: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    decoupled_wd: bool = False,
    roles: Optional[Mapping[str, Role]] = None,
    decay_vectors: bool = True,
    **kw: Any,
) -> torch.optim.Optimizer:
    """An `impl` optimizer with muP's groups for entrywise normalised updates (Adam and its kin).

    Args:
        params: see the module's text.
        impl: the optimizer's class, or a `functools.partial` of one.
        decoupled_wd: leave decay unscaled, for an `impl` whose decay is not multiplied by lr.
        roles: by name; needs named parameters or a module. Default: the module's `.roles`, else each parameter's `infshape`.
        decay_vectors: whether biases and norm gains decay; mup's do.
        **kw: go to `impl`; lr, weight_decay and eps are the base model's. Missing ones are `impl`'s own defaults.
    Raises:
        ConfigError: no parameters; one without role and infshape; lr missing or a tensor; an `impl` of the other family.
    """
    return _build(params, impl, "adam", decoupled_wd, roles, decay_vectors, kw)


def MuAdamW(params: Params, **kw: Any) -> torch.optim.Optimizer:
    """`MuAdam` with `impl=torch.optim.AdamW` unless given; lr x decay is the same at every width."""
    kw.setdefault("impl", torch.optim.AdamW)
    return MuAdam(params, **kw)


def MuSGD(
    params: Params,
    impl: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    decoupled_wd: bool = False,
    roles: Optional[Mapping[str, Role]] = None,
    decay_vectors: bool = True,
    **kw: Any,
) -> torch.optim.Optimizer:
    """An `impl` optimizer with muP's groups for updates proportional to the gradient; arguments as `MuAdam`'s."""
    return _build(params, impl, "sgd", decoupled_wd, roles, decay_vectors, kw)


def _build(
    params: Params,
    impl: Callable[..., torch.optim.Optimizer],
    family: str,
    decoupled_wd: bool,
    roles: Optional[Mapping[str, Role]],
    decay_vectors: bool,
    kw: Dict[str, Any],
) -> torch.optim.Optimizer:
    _check_family(impl, family)
    if "lr" in kw:
        kw["lr"] = plain_number("lr", kw["lr"])
    defaults = _defaults(impl, kw)
    # PopTorch lets a setting change after compilation only if the constructor was given it, so lr goes there as well.
    kw.setdefault("lr", plain_number("lr", defaults["lr"]))
    groups: List[Dict[str, Any]] = []
    seen: Dict[int, int] = {}
    for number, (named, own_roles, options) in enumerate(_incoming(params, roles)):
        for name, parameter in named:
            if seen.setdefault(id(parameter), number) != number:
                raise ConfigError(f"parameter `{name}` is in more than one of the given groups")
        settings = {key: options.pop(key, defaults.get(key)) for key in ("lr", "weight_decay", "eps")}
        settings["weight_decay"] = settings["weight_decay"] or 0.0
        fresh = mu_groups(
            named,
            own_roles,
            family=family,
            decay_vectors=decay_vectors,
            decay="unscaled" if decoupled_wd else "coupled",
            **settings,
        )
        groups.extend({**options, **group} for group in fresh)
    return impl(groups, **kw)


def _defaults(impl: Callable[..., torch.optim.Optimizer], kw: Mapping[str, Any]) -> Dict[str, Any]:
    """What `impl` takes for settings that nobody gave, asked of a throw-away instance: signatures say None, or *args."""
    try:
        defaults = dict(impl([nn.Parameter(torch.zeros(1))], **kw).defaults)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{_class_name(impl)} cannot be built with {sorted(kw)}: {error}", key="optimizer") from error
    if not isinstance(defaults.get("lr"), (int, float)):
        raise ConfigError(f"{_class_name(impl)} has no default lr", key="lr", suggestion="give lr as a keyword")
    return defaults


def _incoming(params: Params, roles: Optional[Mapping[str, Role]]) -> List[Tuple[Named, Mapping[str, Role], Dict[str, Any]]]:
    """(named parameters, roles, other options) of every group given; nothing of the caller's is changed."""
    if isinstance(params, nn.Module):
        roles = roles if roles is not None else getattr(params, "roles", None)
        params = params.named_parameters()
    if torch.is_tensor(params):
        raise ConfigError("the optimizer takes an iterable of parameters, not one tensor")
    items = list(params)
    if not (items and isinstance(items[0], dict)):
        items = [{"params": items}]
    result = []
    for group in items:
        content = group["params"]
        content = [content] if torch.is_tensor(content) else list(content)
        if not content:
            continue
        named = [item if isinstance(item, tuple) else ("", item) for item in content]
        result.append(_with_roles(named, roles) + ({key: value for key, value in group.items() if key != "params"},))
    if not result:
        raise ConfigError("the optimizer was given no parameters", suggestion=NO_PARAMETERS)
    return result


def _with_roles(named: Named, roles: Optional[Mapping[str, Role]]) -> Tuple[Named, Mapping[str, Role]]:
    if roles is not None:
        if not all(name for name, _ in named):
            raise ConfigError(
                "roles are kept by name, but the parameters came without names",
                suggestion="give model.named_parameters(), or the model",
            )
        return named, roles
    found: Dict[str, Role] = {}
    result = []
    for index, (name, parameter) in enumerate(named):
        name = name or f"#{index}"
        inf = getattr(parameter, "infshape", None)
        if inf is None:
            raise ConfigError(
                f"parameter `{name}` of shape {tuple(parameter.shape)} has neither role nor infshape: its rate is unknown",
                suggestion="give the model itself or roles=, or call attach_infshapes(model, base_shapes) on this very model: "
                "deepcopy, to_empty and load_state_dict(assign=True) lose infshapes",
            )
        found[name] = role_of_infshape(inf)
        result.append((name, parameter))
    return result, found


def _check_family(impl: Any, family: str) -> None:
    known = dict.fromkeys(_ADAM_LIKE, "adam")
    known.update(dict.fromkeys(_SGD_LIKE, "sgd"))
    cls: Any = getattr(impl, "func", impl)
    bases: Tuple[Type[Any], ...] = getattr(cls, "__mro__", ())
    for base in bases:
        declared = known.get(base.__name__)
        if declared == family:
            return
        if declared is not None:
            raise ConfigError(
                f"{_class_name(impl)} is of the {declared} family; with {family}'s rule its learning rates would scale wrongly",
                suggestion="MuAdam is for Adam, RMSprop and their kin, MuSGD for SGD",
            )


def _class_name(impl: Any) -> str:
    return str(getattr(getattr(impl, "func", impl), "__name__", impl))
