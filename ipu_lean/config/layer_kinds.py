"""What follows from the keys of a Reformer: the kind of each layer's attention, legal lengths, buckets, the grid of positions.

Pure functions, as in derived.py.
"""

from __future__ import annotations

import math
from typing import Optional, Sequence, Tuple

from ipu_lean.config import derived
from ipu_lean.config.model import IMPLEMENTATIONS, ModelConfig


def distinct_layers(model: ModelConfig) -> int:
    """Layers with weights of their own: the depth, or with shared ones those of all groups."""
    return derived.groups(model) * model.num_inner_groups


def distinct_kinds(model: ModelConfig) -> Tuple[str, ...]:
    """`full`, `local` or `lsh` for each layer that has weights of its own, group by group."""
    asked = model.attention
    if isinstance(asked, str):
        asked = ["full" if asked in IMPLEMENTATIONS else asked]
    return tuple(asked[place % len(asked)] for place in range(distinct_layers(model)))


def kinds(model: ModelConfig) -> Tuple[str, ...]:
    """The same for each layer in execution order, `depth` of them."""
    own, inner = distinct_kinds(model), model.num_inner_groups
    visits = (derived.group_of_visit(model, visit) for visit in range(derived.visits(model)))
    return tuple(own[group * inner + place] for group in visits for place in range(inner))


def uses(model: ModelConfig, kind: str) -> bool:
    """Whether some layer's attention is of this kind."""
    return model.kind == "gpt" and kind in distinct_kinds(model)


def full_below(model: ModelConfig) -> int:
    """Tokens of the longest sequence that lsh layers treat with full attention."""
    return model.lsh.chunk if model.lsh.full_below is None else model.lsh.full_below


def padded_length(model: ModelConfig, length: int) -> int:
    """Tokens that the layers see of a sequence of `length`: itself if every layer can take it, else the next that all can."""
    limits = {"local": (model.local.chunk, model.local.chunk), "lsh": (full_below(model), model.lsh.chunk)}
    return legal_length(length, [limits[kind] for kind in limits if uses(model, kind)])


def legal_length(length: int, limits: Sequence[Tuple[int, int]]) -> int:
    """`length` itself if it suits all layers, else the next multiple of their chunks.

    Args:
        limits: of each kind of chunked attention, (tokens up to which it is full, its chunk).
    """
    if all(length <= whole or length % chunk == 0 for whole, chunk in limits):
        return length
    multiple = 1
    for _, chunk in limits:
        multiple = multiple * chunk // math.gcd(multiple, chunk)  # math.lcm is not in Python 3.8
    return -(-length // multiple) * multiple


def keys_of_a_query(model: ModelConfig, kind: str) -> int:
    """Scores that a token of a whole sequence has with an attention of this kind, in one head."""
    whole = {"full": model.seq, "local": model.local.chunk, "lsh": full_below(model)}
    if model.seq <= whole[kind]:
        return model.seq
    part = model.lsh if kind == "lsh" else model.local
    return (part.before + 1 + part.after) * part.chunk * (model.lsh.hashes if kind == "lsh" else 1)


def bucket_factors(model: ModelConfig, length: int) -> Tuple[int, ...]:
    """Even factors of the number of buckets in a round over `length` tokens."""
    asked = model.lsh.buckets
    if asked is not None:
        return tuple(asked) if isinstance(asked, list) else (asked,)
    return automatic_buckets(length, model.lsh.chunk, padded_length(model, model.seq))


def automatic_buckets(length: int, chunk: int, longest: int) -> Tuple[int, ...]:
    """About two buckets for each chunk of `length` tokens, a power of two; in two factors beyond a limit that follows the longest
    sequence (transformers' rule for `num_buckets: null`, which depends on the length alone and is not kept).
    """
    power = max(1, (2 * (length // chunk)).bit_length() - 1)
    if 2**power > 2 * max(int((longest // chunk) ** 0.5), chunk):
        return 2 ** (power // 2), 2 ** (power - power // 2)
    return (2**power,)


def axial_shape(model: ModelConfig) -> Tuple[int, int]:
    """Rows and columns of the grid of positions: model.axial.shape, or the squarest one that holds model.seq.

    That is an exact product of at most twice as many columns as rows if there is one (4096: 64 x 64, 6000: 75 x 80), else the
    smallest square with a row less where that does.
    """
    if model.axial.shape is not None:
        return model.axial.shape[0], model.axial.shape[1]
    root = math.isqrt(model.seq)
    for rows in range(root, 0, -1):
        if model.seq % rows == 0:
            if model.seq // rows <= 2 * rows:
                return rows, model.seq // rows
            break
    columns = root if root * root >= model.seq else root + 1
    return -(-model.seq // columns), columns


def axial_dims(model: ModelConfig) -> Tuple[int, int]:
    """Features of the row's and the column's vector: model.axial.dims, or a quarter of the width and the rest."""
    if model.axial.dims is not None:
        return model.axial.dims[0], model.axial.dims[1]
    rows = max(1, model.width // 4)
    return rows, model.width - rows


def redraws(model: ModelConfig) -> bool:
    """Whether training hashes, with random directions that are drawn more than once."""
    hashed = uses(model, "lsh") and padded_length(model, model.seq) > full_below(model)
    return hashed and model.lsh.redraw_every > 0


def draw_of(model: ModelConfig, update: int, iterations: int = 1) -> int:
    """The draw of lsh's random directions that update `update` (from 0) hashes with: a step that is a multiple of redraw_every.

    Args:
        iterations: batch.device_iterations. A call of an IPU makes so many updates and cannot draw in between, so on no device a
            draw falls between them.
    """
    first, every = update - update % iterations, model.lsh.redraw_every
    return first - first % every if every else 0


def draw_before(model: ModelConfig, update: int, iterations: int = 1) -> Optional[int]:
    """The draw that is due right before update `update`, None if none is. `iterations`: see `draw_of`."""
    if not uses(model, "lsh") or model.lsh.redraw_every == 0:
        return None
    found = draw_of(model, update, iterations)
    return found if update == 0 or found != draw_of(model, update - 1, iterations) else None


def standing_draw(model: ModelConfig, updates: int, iterations: int = 1) -> Optional[int]:
    """The draw that stands after `updates` updates, as a checkpoint then finds it; None without lsh layers."""
    if not uses(model, "lsh"):
        return None
    return draw_of(model, updates - 1, iterations) if updates else 0
