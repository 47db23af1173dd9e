"""Activations by formula: what the backward pass keeps, and what it needs while it works, in bytes of one micro-batch.

    a layer    its two branches (branches.py)
    kept       `store`: all layers; `checkpoint`: what enters each segment, and one segment's layers; `invert`: the streams, and
               one branch; recomputing engines also keep who attends to whom in hashed layers
    loss       logits, softmax and gradient of the tokens that are alive at once; in chunks also the readout's gradient in fp32
"""

from __future__ import annotations

from typing import List, NamedTuple, Sequence, Tuple

from ipu_lean.config import Config, derived, layer_kinds
from ipu_lean.data import expected_classes
from ipu_lean.nn.loss import automatic_chunk
from ipu_lean.train.memory.branches import GATED, Branch, Sizes, attention, feed_forward, joined, scaled

Layer = Tuple[Branch, Branch]


class Part(NamedTuple):
    """Some layers in a row: of what kinds, and how their activations are saved."""

    kinds: Sequence[str]
    engine: str
    every: int


def parts_of(config: Config) -> List[Part]:
    """The parts of the stack."""
    model = config.model
    kinds, found = layer_kinds.kinds(model), []
    segments = derived.segments(config) or ((model.depth, derived.engine(config), config.memory.checkpoint_every),)
    for layers, engine, every in segments:
        found.append(Part(kinds[:layers], engine, every))
        kinds = kinds[layers:]
    return found


def activation_bytes(config: Config, vocab: int) -> int:
    """The peak beside weights, gradients and copies of weights."""
    return _mlp(config, vocab) if config.model.kind == "mlp" else _gpt(config, vocab)


def _gpt(config: Config, vocab: int) -> int:
    sizes, model = Sizes(config), config.model
    hidden = derived.hidden_width(model)
    begin, later = _loss(config, hidden, vocab)
    # A tied matrix waits for the embedding's part of its gradient; in the end there are both and their sum.
    matrix, tied = sizes.weight * vocab * model.width, derived.tied(model)
    ends = 2 * sizes.tokens * hidden * sizes.stream
    kept, most = backward(config, sizes)
    waiting = (matrix if tied else 0) + _shared(config, sizes)
    during = max(kept + ends + begin, most + waiting, kept + ends + later)
    end = (3 if tied else 1) * matrix
    return end if end > during + copy_bytes(config, vocab) else during  # of copies of weights nothing is left at the end


def _shared(config: Config, sizes: Sizes) -> int:
    """Gradients of layers that come again, which wait for their other visits; what is stored of a layer goes meanwhile."""
    own, up = layer_kinds.distinct_kinds(config.model), 2 if config.model.activation in GATED else 1
    if len(own) == config.model.depth or all(part.engine == "store" for part in parts_of(config)):
        return 0
    square, matrix = sizes.width * sizes.inside, sizes.width * sizes.ffn
    return sizes.weight * sum((3 if kind == "lsh" else 4) * square + (up + 1) * matrix for kind in own)


def backward(config: Config, sizes: Sizes) -> Tuple[int, int]:
    """(kept through the whole forward pass, the most that is alive while gradients of layers are taken)."""
    state = (2 if config.model.stack.kind == "reversible" else 1) * sizes.width * sizes.stream * sizes.tokens
    made = {kind: (attention(config, kind), feed_forward(config)) for kind in set(layer_kinds.kinds(config.model))}
    found = [(part, [made[kind] for kind in part.kinds]) for part in parts_of(config)]
    kept = [_kept(part, layers, state, sizes) for part, layers in found]
    standing, most = sum(kept), 0
    for (part, layers), own in zip(reversed(found), reversed(kept)):
        if part.engine == "store":
            most = max(most, _walk(layers, standing))
        elif part.engine == "checkpoint":
            most = max(most, _checkpointed(layers, part.every, state, standing))
        else:
            most = max([most, *(standing + branch.kept + branch.work for pair in layers for branch in pair)])
        standing -= own
    return sum(kept), most


def _kept(part: Part, layers: Sequence[Layer], state: int, sizes: Sizes) -> int:
    """What a part keeps from its forward pass to its backward pass."""
    if part.engine == "store":
        return sum(first.kept + second.kept for first, second in layers)
    order = sum(first.order for first, _ in layers) // (8 if sizes.seq <= 2**15 else 4)  # one small integer of two large ones
    # `invert`: both streams, and what the first branch reads; later one that is being derived.
    return order + (3 * state // 2 if part.engine == "invert" else -(-len(layers) // part.every) * state)


def _checkpointed(layers: Sequence[Layer], every: int, state: int, standing: int) -> int:
    """The same for layers that are run again, `every` at a time, the last ones first. What enters a segment is kept already: it
    does not count among what the segment's first norm keeps."""
    most = 0
    for first in reversed(range(0, len(layers), every)):
        run = layers[first : first + every]
        most = max(most, _walk(run, standing - state + sum(a.kept + b.kept for a, b in run)))
        standing -= state + sum(a.order for a, _ in run) // 8
    return most


def _walk(layers: Sequence[Layer], standing: int) -> int:
    """The most that is alive while these layers' gradients are taken, the last first, with `standing` bytes at its beginning."""
    most = 0
    for branch in [branch for pair in layers for branch in pair][::-1]:
        most = max(most, standing + branch.work)
        standing -= branch.kept
    return most


def _loss(config: Config, hidden: int, vocab: int) -> Tuple[int, int]:
    """(while the loss is computed, while its gradient is handed on)."""
    sizes = Sizes(config)
    if config.model.head == "classifier":
        rows = 12 * sizes.micro * expected_classes(config)
        return rows, rows
    tokens, chunk = config.batch.micro * config.model.seq, config.memory.loss_chunk
    chunk = automatic_chunk(tokens, vocab) if chunk is None else min(chunk, tokens)
    if not 0 < chunk < tokens:
        return tokens * 8 * vocab, tokens * 12 * vocab  # in fp32: logits, their log-softmax, and a gradient
    logits = (4 if sizes.element == 4 else 8) * vocab  # as they come, in fp32, and their gradient
    matrix, weight = vocab * hidden, sizes.weight
    made = weight if sizes.element == weight else weight + sizes.element
    return chunk * logits + matrix * (4 + made) + tokens * hidden * sizes.stream, 2 * matrix * weight


def copy_bytes(config: Config, vocab: int) -> int:
    """Copies of weights that are alive at once: casts to 16 bits (autocast), matrices joined to one or scaled by a depth rule.

    The backward pass needs them, so `store` keeps those of all layers; other engines make them again, a branch at a time.
    """
    mixed, model, sizes = config.precision.endswith("mixed"), config.model, Sizes(config)
    if model.kind == "mlp":
        return 2 * (((model.features or 0) + (model.depth - 1) * model.width + vocab) * model.width) if mixed else 0
    own = layer_kinds.distinct_kinds(model)
    shared = mixed and len(own) < model.depth
    made = {kind: _copies(config, sizes, kind, shared) for kind in set(own)}
    # Casts of weights that come again are kept by autocast through the forward pass.
    kept = most = sum(made[kind].cached for kind in own)
    for kinds, engine, every in parts_of(config):  # those of later parts are not there yet, or not any more
        found = [made[kind] for kind in kinds]
        if engine == "store":
            kept += sum(one.kept for one in found)
            most = max(most, kept + max(one.beside for one in found))
        elif engine == "checkpoint":
            segments = [found[first : first + every] for first in range(0, len(found), every)]
            most = max(most, *(kept + sum(one.kept for one in run) + max(one.beside for one in run) for run in segments))
        else:
            most = max(most, kept + max(one.at_once for one in found))
    head = model.width * expected_classes(config) if model.head == "classifier" else derived.hidden_width(model) * vocab
    head += derived.hidden_width(model) * model.width if model.head == "classifier" else 0
    readout = sizes.element * head if mixed else 0
    # The grid of axial positions is made of their tables, and gone when it has been added.
    grid = sizes.weight * model.seq * model.width if model.positions == "axial" else 0
    return max(most, kept + readout, grid)


class _Copies(NamedTuple):
    """Of a layer: what its branches keep (one whose pieces are run again: nothing), what there is beside it at the most, and the
    most of a single branch; `cached` is apart from these."""

    kept: int
    beside: int
    at_once: int
    cached: int


def _copies(config: Config, sizes: Sizes, kind: str, shared: bool) -> _Copies:
    mixed, model, element = sizes.mixed, config.model, sizes.element
    square, matrix, one = sizes.width * sizes.inside, sizes.width * sizes.ffn, joined(config, kind)
    multiplied = scaled(config)
    inputs, up = 2 if kind == "lsh" else 3, 2 if model.activation in GATED else 1
    # (attention, feed-forward): made of weights themselves, and of what was joined or multiplied first.
    cast = [(0 if one else inputs * square) + (0 if multiplied else square), up * matrix - (matrix if multiplied else 0) + matrix]
    cast = [element * count if mixed else 0 for count in cast]
    attended, fed = element * ((inputs * square if one else 0) + (square if multiplied else 0)), element * matrix * multiplied
    cached = sum(cast) if shared else 0
    if not shared:
        attended, fed = attended + cast[0], fed + cast[1]
    # Joined and scaled in fp32 before they are cast: one such matrix is alive for a moment.
    passing = (4 * inputs * square if mixed and one else 0, 4 * matrix if mixed and multiplied else 0)
    joining = element * inputs * square + passing[0] if one else 0  # before the output's matrix is there
    heads = config.memory.attention_heads_at_once
    pieces = sizes.in_pieces(config, kind)
    kept = (0 if pieces else attended) + (0 if config.memory.ffn_chunk else fed)
    # The feed-forward's copies come after the attention's, and go before them.
    attending = attended * min(heads, sizes.heads) // sizes.heads if pieces else max(joining - attended, 0)
    feeding = fed + passing[1] if config.memory.ffn_chunk else passing[1]
    beside = max(attending - (0 if config.memory.ffn_chunk else fed), feeding)
    return _Copies(kept, beside, max(joining, attended, fed + passing[1]), cached)


def _mlp(config: Config, vocab: int) -> int:
    """The activations at the moment when they and the copies of weights are most, step by step as a `MLP` computes."""
    sizes, rows, model = Sizes(config), config.batch.micro, config.model
    plane, features = rows * model.width * sizes.element, model.features or 0
    images = 0 if sizes.element == 4 else rows * features * sizes.element  # in the type of the weights, or cast by autocast
    # What a relu's gradient reads is its output, which the next product reads as well; others read their input, and dropout keeps
    # a mask of the same type. What only a product read is gone when the gradient comes to the activation before it.
    shared = model.activation == "relu" and not model.dropout
    own = (1 if shared else 3 if model.dropout else 2) * plane
    gone = 0 if shared else plane
    # Scaled features are kept in place of those that went in, unless a relu reads these again; the forward pass has both.
    scaled, both = (plane if shared and _scales(config) else 0), (gone if _scales(config) else 0)
    square = model.width * model.width
    copies = [2 * square * max(0, place) if sizes.mixed else 0 for place in range(-1, model.depth)]
    head = 2 * vocab * model.width if sizes.mixed else 0
    first = 2 * features * model.width if sizes.mixed else 0  # cast for the forward pass only
    kept = images + model.depth * own + scaled
    loss = rows * vocab
    moments = [
        (kept + both + 8 * loss + 8 * rows, first + copies[-1] + head),
        (kept + 12 * loss, copies[-1] + head),
        (kept + plane + (loss + vocab * model.width) * sizes.element, copies[-1] + head),
    ]
    for layer in reversed(range(model.depth)):
        below = images + layer * own
        matrix = square if layer else features * model.width
        handed = plane if layer else 0
        moments.append((below + own - gone + 2 * plane, copies[layer + 1]))
        moments.append((below + plane + handed + matrix * sizes.element, copies[layer + 1]))
        moments.append(((below if layer else 0) + handed + matrix * sizes.made, copies[layer]))
    return max(moments, key=sum)[0]


def _scales(config: Config) -> bool:
    """Whether the readout multiplies its input (muP away from the base width, or a multiplier of its own)."""
    model, mup = config.model, config.mup
    return mup.output_mult != 1.0 or (mup.parametrization == "mup" and mup.base_width not in (None, model.width))
