"""How tensors of two checkpoints correspond, as a list that is read in both directions."""

from __future__ import annotations

from typing import Dict, Iterable, List, NamedTuple, Sequence, Tuple

import torch

from ipu_lean.errors import ConfigError

Tensors = Dict[str, torch.Tensor]
Shapes = Dict[str, torch.Size]


class Part(NamedTuple):
    """One tensor of theirs, and the one (or several, under each other) of ours that it holds.

    Attributes:
        transposed: theirs is `[in, out]`, ours `[out, in]`.
    """

    theirs: str
    ours: Tuple[str, ...]
    transposed: bool = False


def read_parts(parts: Sequence[Part], theirs: Tensors, shapes: Shapes, ignored: Iterable[str] = ()) -> Tensors:
    """Our tensors from theirs.

    Args:
        shapes: of ours, by name.
        ignored: last words of names that hold constants (masks) and nothing learnt.
    Raises:
        ConfigError: tensors that are missing, unknown, or of another shape.
    """
    known = {part.theirs for part in parts}
    missing = [part.theirs for part in parts if part.theirs not in theirs]
    unknown = [name for name in theirs if name not in known and name.rpartition(".")[2] not in ignored]
    if missing:
        raise ConfigError(f"the checkpoint lacks {_names(missing)}, which its config.json calls for", key="SOURCE")
    if unknown:
        raise ConfigError(f"the checkpoint holds tensors that this model has no place for: {_names(unknown)}", key="SOURCE")
    ours: Tensors = {}
    for part in parts:
        given = theirs[part.theirs]
        rows = [shapes[name] for name in part.ours]
        whole = (sum(shape[0] for shape in rows), *rows[0][1:])
        expected = whole[::-1] if part.transposed else whole
        if tuple(given.shape) != tuple(expected):
            raise ConfigError(
                f"{part.theirs} has the shape {list(given.shape)}, and config.json makes it {list(expected)}", key="SOURCE"
            )
        given = given.t() if part.transposed else given
        for name, piece in zip(part.ours, given.split([shape[0] for shape in rows])):
            ours[name] = piece.contiguous().clone()
    return ours


def write_parts(parts: Sequence[Part], ours: Tensors) -> Tensors:
    """Their tensors from ours."""
    theirs: Tensors = {}
    for part in parts:
        whole = torch.cat([ours[name] for name in part.ours])
        theirs[part.theirs] = (whole.t() if part.transposed else whole).contiguous()
    return theirs


def _names(names: List[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
