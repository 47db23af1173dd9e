"""Infinite dimensions: which sizes of a tensor grow with the model's width, and from what base.

Own classes with the attributes and methods of the `mup` package's (Yang and Hu, Tensor Programs V), so that stock
`mup.MuAdam(model.parameters())` works on a model of ours. No forward pass reads them: deepcopy, vmap, FSDP, parameter
replacement and PopTorch lose attributes of parameters. They are a view; `Role`s, keyed by name, are the source.
"""
from __future__ import annotations

from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from torch import nn

from ipu_lean.errors import ConfigError, did_you_mean


class InfDim:
    """One dimension: its size and its size in the base model (None: it does not grow with width)."""

    def __init__(self, base_dim: Optional[int], dim: Optional[int]) -> None:
        self.base_dim, self.dim = base_dim, dim

    def isinf(self) -> bool:
        return self.base_dim is not None

    def width_mult(self) -> float:
        """dim / base_dim, or 1 for a finite dimension."""
        return self.dim / self.base_dim if self.base_dim is not None and self.dim is not None else 1

    def __eq__(self, other: Any) -> bool:
        return hasattr(other, "base_dim") and (self.base_dim, self.dim) == (other.base_dim, other.dim)

    def __hash__(self) -> int:
        return hash((self.base_dim, self.dim))

    def __repr__(self) -> str:
        return f"InfDim({self.base_dim}, {self.dim})"


class InfShape(tuple):
    """A tuple of `InfDim`, one a dimension. `main` is the last infinite one: fan-in of a matrix, the only one of a vector."""

    main_idx: Optional[int]
    main: Optional[InfDim]

    def __init__(self, dims: Iterable[InfDim] = ()) -> None:
        infinite = [i for i, dim in enumerate(self) if dim.isinf()]
        self.main_idx = infinite[-1] if infinite else None
        self.main = self[infinite[-1]] if infinite else None

    def ninf(self) -> int:
        return sum(dim.isinf() for dim in self)

    def width_mult(self) -> float:
        return self.main.width_mult() if self.main is not None else 1

    def fanin_fanout(self) -> Tuple[InfDim, InfDim]:
        assert len(self) >= 2, "a vector has neither fan-in nor fan-out"
        return self[1], self[0]

    def fanin_fanout_mult_ratio(self) -> float:
        fan_in, fan_out = self.fanin_fanout()
        return fan_in.width_mult() / fan_out.width_mult()

    def base_shape(self) -> List[Optional[int]]:
        return [dim.base_dim for dim in self]

    def shape(self) -> List[Optional[int]]:
        return [dim.dim for dim in self]

    def serialize(self) -> Dict[str, List[Optional[int]]]:
        return {"base_shape": self.base_shape(), "shape": self.shape()}

    def __eq__(self, other: Any) -> bool:
        # mup's compares with zip, so that shapes of different rank can be equal; here they are not.
        return isinstance(other, tuple) and len(self) == len(other) and all(a == b for a, b in zip(self, other))

    def __ne__(self, other: Any) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def __repr__(self) -> str:
        return f"InfShape({list(self)})"


def make_infshape(base: Sequence[Optional[int]], shape: Sequence[int]) -> InfShape:
    """The `InfShape` of a tensor of `shape` whose base shape is `base` (None = finite), both of the same rank."""
    assert len(base) == len(shape), f"ranks differ: base {tuple(base)}, shape {tuple(shape)}"
    return InfShape(InfDim(base_dim, int(dim)) for base_dim, dim in zip(base, shape))


def match_names(base: Mapping[str, Any], names: Iterable[str], what: str = "the model") -> None:
    """Both must name the same tensors.

    Raises:
        ConfigError: listing up to three names on each side that the other lacks.
    """
    names = list(names)
    missing = [name for name in names if name not in base]
    extra = [name for name in base if name not in set(names)]
    if not missing and not extra:
        return
    parts = []
    if missing:
        parts.append(f"{what} has {len(missing)} tensors that the base shapes lack ({', '.join(missing[:3])})")
    if extra:
        parts.append(f"the base shapes have {len(extra)} that {what} lacks ({', '.join(extra[:3])})")
    near = did_you_mean(missing[0], extra) if missing and extra else None
    same = "base and target must differ in width only: same depth, same layers, same options"
    hint = f"is `{missing[0]}` the base's `{near}`?" if near else same
    raise ConfigError("; ".join(parts), key="mup.base", suggestion=hint)


def attach_infshapes(model: nn.Module, base_shapes: Mapping[str, Sequence[Optional[int]]]) -> nn.Module:
    """Set `p.infshape` on every parameter, as `mup.set_base_shapes` does, without touching a value. Returns `model`.

    Call it again after deepcopy, `load_state_dict(assign=True)`, `to_empty` or whatever else makes new parameters, if the
    stock `mup` package is to be used on the result; nothing of ours needs it.

    Raises:
        ConfigError: names or ranks differ.
    """
    parameters = dict(model.named_parameters())
    match_names(base_shapes, parameters)
    for name, parameter in parameters.items():
        base = base_shapes[name]
        if len(base) != parameter.dim():
            raise ConfigError(
                f"`{name}` has shape {tuple(parameter.shape)} but base shape {tuple(base)}: the ranks differ", key="mup.base"
            )
        parameter.infshape = make_infshape(base, parameter.shape)  # type: ignore[attr-defined]
    return model
