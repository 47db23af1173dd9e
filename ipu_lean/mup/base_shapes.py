"""Which dimensions grow with width: found by building the model at two widths and comparing shapes (on `meta`: no memory or RNG).

Two ways to say what the base is. A: `base_shapes_from_width`, one builder with the width as its variable. B:
`base_shapes_from_pair`, the shapes of two models. Both refuse what would silently give another parametrisation than muP.
"""
from __future__ import annotations

import random
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.mup.bsh import BaseShapes
from ipu_lean.mup.infshape import match_names

Shapes = Dict[str, Tuple[int, ...]]


def shapes_of(model: nn.Module) -> Shapes:
    """{name: shape} of every parameter; a tied one once, under its first name."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def shapes_on_meta(build: Callable[[], nn.Module]) -> Shapes:
    """The shapes of what `build()` returns, built on `meta`. torch's CPU generator, `random` and numpy's are as before."""
    import numpy

    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return shapes_of(build())
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def base_shapes_from_width(
    build_at_width: Callable[[int], nn.Module], base_width: int, target_width: Optional[int] = None
) -> BaseShapes:
    """Mode A: build at `base_width` and at twice that; sizes that differ are infinite, with the base's size.

    Args:
        build_at_width: the model as a function of its width, all else as in the target.
        target_width: if given, the target's shapes are checked as well. It may be smaller than the base.
    Raises:
        ConfigError: the model cannot be built at a width; a size grows but not in proportion; a size that does not grow
            differs in the target; nothing grows. It names the tensor, the three shapes, and a likely cause.
    """

    def shapes_at(width: int, what: str) -> Shapes:
        try:
            return shapes_on_meta(lambda: build_at_width(width))
        except (ConfigError, AssertionError, ValueError, RuntimeError) as error:
            reason = getattr(error, "rule", None) or str(error) or type(error).__name__
            raise ConfigError(
                f"the model cannot be built at width {width} ({what}): {reason}",
                key="mup.base_width",
                value=base_width,
                suggestion="choose a base width at which heads and all other sizes divide as in the target, or fix the head size",
            ) from error

    base, delta = shapes_at(base_width, "the base"), shapes_at(2 * base_width, "twice the base")
    result = _infinite_where_different(base, delta)
    _check_proportional(base, delta, lambda: shapes_at(4 * base_width, "four times the base"))
    if target_width is not None:
        target = shapes_at(target_width, "the target")
        _check_target(base, delta, target)
        _check_ratio(base, delta, target, target_width / base_width)
    return result


def base_shapes_from_pair(base: Shapes, delta: Shapes, target: Optional[Shapes] = None) -> BaseShapes:
    """Mode B: sizes that differ between `base` and `delta` are infinite, with `base`'s size.

    `delta` differs from `base` in width only; the target itself will do if it is of another width than the base. Different
    kinds of width (model, FFN) may grow by different factors.

    Raises:
        ConfigError: names or ranks differ; nothing grows; with `target`, a size that does not grow differs from the base's.
    """
    result = _infinite_where_different(base, delta)
    if target is not None:
        _check_target(base, delta, target)
    return result


def finite_base_shapes(shapes: Mapping[str, Sequence[int]]) -> BaseShapes:
    """Base shapes of the standard parametrisation: nothing grows, every multiplier is 1."""
    return {name: (None,) * len(shape) for name, shape in shapes.items()}


def _infinite_where_different(base: Shapes, delta: Shapes) -> BaseShapes:
    match_names(base, delta, "the second model")
    for name, shape in base.items():
        if len(shape) != len(delta[name]):
            raise _mismatch(name, base, delta, None, "the ranks differ", "base and delta must be one architecture")
    result: BaseShapes = {
        name: tuple(size if size != other else None for size, other in zip(shape, delta[name])) for name, shape in base.items()
    }
    if not any(size is not None for shape in result.values() for size in shape):
        raise ConfigError(
            "nothing grows between base and delta, so every multiplier would be 1: the standard parametrisation under muP's name",
            key="mup.base",
            suggestion="give a base whose width differs, or set `mup.parametrization: standard`",
        )
    return result


def _check_proportional(base: Shapes, delta: Shapes, build_fourfold: Callable[[], Shapes]) -> None:
    """Sizes that differ must double from base to delta, up to rounding to whole numbers.

    A size a*width + c with a whole c != 0 shows the same remainder 2*base - delta again one doubling later; a size that was
    rounded from a proportional one cannot (its error would have to exceed 1/2 somewhere), so a third build tells them apart.
    """
    fourfold: Optional[Shapes] = None
    for name, shape in base.items():
        for axis, (size, other) in enumerate(zip(shape, delta[name])):
            remainder = 2 * size - other
            if size == other or remainder == 0:
                continue
            if abs(remainder) == 1:
                fourfold = build_fourfold() if fourfold is None else fourfold
                if 2 * other - fourfold[name][axis] != remainder:
                    continue
            raise _mismatch(
                name, base, delta, None,
                f"dimension {axis} grows with width but not in proportion ({size} to {other} when the width doubles)",
                "a constant is added to the width, or the size is rounded to a multiple; make it a fixed multiple of the width",
            )  # fmt: skip


def _check_target(base: Shapes, delta: Shapes, target: Shapes) -> None:
    """Names and ranks agree, and a size that is equal in base and delta is the same in the target."""
    match_names(base, target, "the target")
    for name, shape in target.items():
        if len(shape) != len(base[name]):
            raise _mismatch(name, base, delta, target, "the ranks differ", "base and target must be one architecture")
        for axis, size in enumerate(shape):
            if base[name][axis] == delta[name][axis] != size:
                raise _mismatch(
                    name, base, delta, target,
                    f"dimension {axis} does not grow from base to delta, yet the target's differs",
                    "vocabulary, context or head size differ between base and target; or the size is hard-coded, or stuck at a "
                    "minimum, at the base's width",
                )  # fmt: skip


def _check_ratio(base: Shapes, delta: Shapes, target: Shapes, ratio: float) -> None:
    """With one width variable, every growing size has the target's ratio to the base, up to rounding to whole numbers."""
    for name, shape in target.items():
        for axis, size in enumerate(shape):
            start = base[name][axis]
            # Both sizes may be rounded by half a unit; the base's half is multiplied with it.
            if start != delta[name][axis] and abs(size - ratio * start) > 0.5 + 0.5 * ratio:
                raise _mismatch(
                    name, base, delta, target,
                    f"dimension {axis} is {size / start:g} times the base's, while the width is {ratio:g} times",
                    "the size is rounded, or divided into heads or groups, differently at the target's width",
                )  # fmt: skip


def _mismatch(name: str, base: Shapes, delta: Shapes, target: Optional[Shapes], what: str, guess: str) -> ConfigError:
    shapes: List[str] = [f"base {base[name]}", f"delta {delta[name]}"]
    if target is not None:
        shapes.append(f"target {target[name]}")
    return ConfigError(f"`{name}` ({', '.join(shapes)}): {what}", key="mup.base", suggestion=guess)
