"""What each tensor is to the width: its `Role`, plain data keyed by the parameter's name.

Optimizers derive learning rate, decay and eps from it by their own family's rule; checkpoints store it; `explain` prints it.
Roles are kept in a dict on the model, never on the parameters: deepcopy, vmap, FSDP, `functional_call`, `to_empty`,
`load_state_dict(assign=True)` and PopTorch replace parameters and lose whatever hangs on them.
"""
from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Callable, Container, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from torch import nn
from torch.nn.modules.conv import _ConvNd

from ipu_lean.errors import ConfigError
from ipu_lean.mup.infshape import InfShape, make_infshape, match_names

KINDS = ("embedding", "hidden", "readout", "vector", "input")


@dataclass(frozen=True)
class Role:
    """One tensor's role.

    Attributes:
        kind: `embedding` (finite to infinite, by look-up), `input` (finite to infinite, by product), `hidden` (infinite to
            infinite), `readout` (infinite to finite), `vector` (one axis or none). Without any infinite dimension the kind
            only labels; every multiplier is 1.
        m_in, m_out: fan-in and fan-out over the base's; 1 for finite ones; a vector has both equal.
        depth_mult: the multiplier of the residual branch that the tensor sits in (CompleteP: base depth / depth); 1 outside.
        forward_mult: what the layer multiplies its input with before the weight: output_mult / width_mult of a readout.
        init_std: standard deviation at initialisation as the layer states it, 0 for zeros and constants; nan if it states none.
        tied: the tensor is used by more than one layer; kind and m are the embedding's, forward_mult the readout's.
    """

    kind: str
    m_in: float
    m_out: float
    depth_mult: float = 1.0
    forward_mult: float = 1.0
    init_std: float = math.nan
    tied: bool = False

    def as_dict(self) -> Dict[str, Any]:
        return asdict(self)


def roles_to_json(roles: Mapping[str, Role]) -> str:
    """Strict JSON, one object a tensor; an unknown init_std is null."""
    plain = {name: role.as_dict() for name, role in roles.items()}
    for entry in plain.values():
        entry["init_std"] = None if math.isnan(entry["init_std"]) else entry["init_std"]
    return json.dumps(plain, indent=1, allow_nan=False)


def roles_from_json(text: str) -> Dict[str, Role]:
    """The inverse of `roles_to_json`.

    Raises:
        ConfigError: not such a file.
    """
    known = {field.name for field in fields(Role)}
    try:
        plain = json.loads(text)
        roles = {}
        for name, entry in plain.items():
            unknown = set(entry) - known
            if unknown or entry["kind"] not in KINDS:
                raise ValueError(f"`{name}` has {sorted(unknown) or entry['kind']!r}")
            entry["init_std"] = math.nan if entry.get("init_std") is None else float(entry["init_std"])
            roles[name] = Role(**entry)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"not a file of muP roles ({error})", suggestion="write it again with roles_to_json") from error
    return roles


class Use(NamedTuple):
    """One place where a parameter lives: the module, its own name, and the parameter's name in it."""

    module: nn.Module
    path: str
    leaf: str


def compute_roles(
    model: nn.Module,
    base_shapes: Mapping[str, Sequence[Optional[int]]],
    *,
    depth_scaled: Container[str] = (),
    depth_mult: float = 1.0,
) -> Dict[str, Role]:
    """{name: Role} of every parameter, from module types and infinite dimensions; only shapes are read, so `meta` will do.

    A matrix is a readout if it maps an infinite to a finite dimension in a module that has `width_mult` (and `output_mult`),
    a number or mup's method; a plain layer that does so is refused. A look-up table is an `nn.Embedding` or a parameter of
    shape [finite, …, infinite] in a module that is no `nn.Linear` or convolution. `init_stds` of the module that owns the
    parameter, or of one around it, gives init_std ({name relative to that module: std}).

    Args:
        depth_scaled: names of the parameters inside residual branches; they get `depth_mult`, the others 1.
    Raises:
        ConfigError: names or ranks differ from the base shapes; an infinite-to-finite layer without a readout's multiplier; a
            readout whose own width_mult contradicts the base shapes; more than two infinite dimensions.
    """
    uses = _uses(model)
    parameters = dict(model.named_parameters())
    match_names(base_shapes, parameters)
    roles: Dict[str, Role] = {}
    for name, parameter in parameters.items():
        base, shape = base_shapes[name], tuple(parameter.shape)
        if len(base) != len(shape):
            raise ConfigError(f"`{name}` has shape {shape} but base shape {tuple(base)}: the ranks differ", key="mup.base")
        where = uses[id(parameter)]
        inf = make_infshape(base, shape)
        kind, m_in, m_out = _kind(name, inf, where)
        roles[name] = Role(
            kind=kind,
            m_in=m_in,
            m_out=m_out,
            depth_mult=float(depth_mult) if name in depth_scaled else 1.0,
            forward_mult=_forward_mult(name, inf, where) if len(shape) > 1 else 1.0,
            init_std=_init_std(model, where),
            tied=len(where) > 1,
        )
    return roles


def role_of_infshape(inf: Any) -> Role:
    """The role that an `infshape` alone gives (ours or mup's). The module is unknown, so [finite, infinite] is a look-up table.

    Raises:
        ConfigError: more than two infinite dimensions.
    """
    kind, m_in, m_out = _kind("a parameter", InfShape(inf), [])
    return Role(kind, m_in, m_out)


def _uses(model: nn.Module) -> Dict[int, List[Use]]:
    found: Dict[int, List[Use]] = {}
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), []).append(Use(module, path, leaf))
    for path, module in model.named_modules():
        # A tied readout of ours registers no parameter: it says which tensors it reads.
        reads = module.tensors() if hasattr(module, "width_mult") and hasattr(module, "tensors") else []
        for tensor in reads:
            known = found.get(id(tensor), [])
            if known and all(use.module is not module for use in known):
                known.append(Use(module, path, ""))
    return found


def _axes(shape: InfShape, where: Sequence[Use]) -> Tuple[int, int]:
    """(axis of fan-out, axis of fan-in)."""
    for use in where:
        if isinstance(use.module, _ConvNd):
            return (1, 0) if use.module.transposed else (0, 1)
    infinite = [axis for axis, dim in enumerate(shape) if dim.isinf()]
    # Stacks of matrices, [experts, out, in]: the two infinite axes tell; otherwise the last two are out and in, as in a matrix.
    return (infinite[0], infinite[1]) if len(infinite) == 2 else (len(shape) - 2, len(shape) - 1)


def _kind(name: str, inf: InfShape, where: Sequence[Use]) -> Tuple[str, float, float]:
    """(kind, m_in, m_out) of one tensor."""
    if inf.ninf() > 2:
        raise ConfigError(
            f"`{name}` of shape {tuple(inf.shape())} has more than two dimensions that grow with width; muP has no rule for it",
            suggestion="write it as products of matrices",
        )
    if len(inf) <= 1:
        return "vector", float(inf.width_mult()), float(inf.width_mult())
    out_axis, in_axis = _axes(inf, where)
    m_out, m_in = float(inf[out_axis].width_mult()), float(inf[in_axis].width_mult())
    is_readout = any(hasattr(use.module, "width_mult") for use in where)
    is_product = is_readout or any(isinstance(use.module, (nn.Linear, _ConvNd)) for use in where)
    if is_product and not is_readout and inf.ninf() == 1 and inf[in_axis].isinf():
        raise _plain_readout(name, inf, where)
    if any(isinstance(use.module, nn.Embedding) for use in where):
        return "embedding", 1.0, float(inf.width_mult())
    if inf.ninf() == 2:
        return "hidden", m_in, m_out
    if inf.ninf() == 0:
        return ("readout" if is_readout else "hidden"), 1.0, 1.0
    if inf[in_axis].isinf():
        # In a table [entries, width] the last axis is what a look-up puts out.
        return ("readout", m_in, 1.0) if is_product else ("embedding", 1.0, m_in)
    return "input", 1.0, float(inf.width_mult())


def _plain_readout(name: str, inf: InfShape, where: Sequence[Use]) -> ConfigError:
    return ConfigError(
        f"`{name}` (base {tuple(inf.base_shape())}, target {tuple(inf.shape())}; None does not grow) maps a dimension that grows "
        f"with width to one that does not, in a plain {type(where[-1].module).__name__} without muP's 1/width multiplier",
        key="mup.base",
        suggestion="if it is the output layer, make it a PopReadout (`is_readout_layer`); if it is inside the network, its size "
        "is probably hard-coded (an FFN or head size given as a number): write it as a ratio of the width",
    )


def _forward_mult(name: str, inf: InfShape, where: Sequence[Use]) -> float:
    """output_mult / width_mult of the readout that uses the tensor, or `output_mult` of another layer, or 1."""
    fan_in = float(inf.width_mult())
    result = 1.0
    for use in where:
        own = getattr(use.module, "width_mult", None)
        output_mult = float(getattr(use.module, "output_mult", 1.0))
        if own is None:
            result *= output_mult if len(where) == 1 else 1.0
            continue
        # mup's is a method that asks the infshape; ours is a number fixed when the layer was built, so it can disagree.
        width_mult = fan_in if callable(own) else float(own)
        if not math.isclose(width_mult, fan_in, rel_tol=1e-9):
            raise ConfigError(
                f"the readout `{name}` divides by {width_mult:g}, but the base shapes say {fan_in:g} "
                f"(base {tuple(inf.base_shape())}, target {tuple(inf.shape())})",
                key="mup.base",
                suggestion="the layer's base_width and the base of the shapes must be one",
            )
        result = output_mult / width_mult
    return result


def _init_std(model: nn.Module, where: Sequence[Use]) -> float:
    """`init_stds` of the innermost module around the parameter that names it; of a tied one the first use counts."""
    for use in where:
        parts = use.path.split(".") if use.path else []
        for depth in range(len(parts), -1, -1):
            stds = getattr(_submodule(model, parts[:depth]), "init_stds", None)
            relative = ".".join(parts[depth:] + [use.leaf])
            if isinstance(stds, Mapping) and relative in stds:
                return float(stds[relative])
    return math.nan


def _submodule(model: nn.Module, parts: Sequence[str]) -> nn.Module:
    find: Callable[[nn.Module, str], Any] = getattr
    module: Any = model
    for part in parts:
        module = find(module, part)
    return module
