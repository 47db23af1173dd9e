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
from ipu_lean.train.memory.branches import GATED, Branch, attention, feed_forward
from ipu_lean.train.memory.sizes import Sizes, affine, joined, scaled

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
    # The stack's result, and what the last norm made of it: as the readout's product reads it, or of all chunks.
    normed = sizes.stream if model.head == "classifier" or _chunk(config, vocab) else sizes.element
    ends = sizes.tokens * hidden * (sizes.stream + normed)
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
    made = {kind: (attention(config, kind), feed_forward(config)) for kind in set(layer_kinds.kinds(config.model))}
    found = [(part, [made[kind] for kind in part.kinds]) for part in parts_of(config)]
    enters = [_entering(config, sizes, part.engine, number == 0) for number, (part, _) in enumerate(found)]
    kept = [_kept(part, layers, entering, sizes, config) for (part, layers), entering in zip(found, enters)]
    standing, most = sum(kept), 0
    for (part, layers), own, entering in reversed(list(zip(found, kept, enters))):
        if part.engine == "store":
            most = max(most, _walk(layers, standing, _beside(config, sizes)))
        elif part.engine == "checkpoint":
            most = max(most, _checkpointed(config, layers, part.every, sizes, entering, standing))
        else:
            most = max(most, _inverted(config, layers, sizes, standing))
        standing -= own
    return sum(kept), most


def _state(config: Config, sizes: Sizes) -> int:
    """What passes from layer to layer."""
    return (2 if config.model.stack.kind == "reversible" else 1) * sizes.stream_bytes


def _entering(config: Config, sizes: Sizes, engine: str, begins: bool) -> int:
    """What a part of the stack keeps of its input. The stack's own is one tensor as both streams (twice the same, or its halves,
    which keep the whole), and zeros beside it where somebody keeps them; `invert` keeps what the first branch reads."""
    stack, state = config.model.stack, _state(config, sizes)
    both = engine == "checkpoint" or (engine == "invert" and affine(config))
    if not begins or stack.kind != "reversible":
        return state if both else sizes.stream_bytes
    zeros = sizes.stream_bytes if both and derived.stack_input(stack).startswith("zeros") else 0
    return sizes.tokens * config.model.width * sizes.stream + zeros


def _kept(part: Part, layers: Sequence[Layer], entering: int, sizes: Sizes, config: Config) -> int:
    """What a part keeps from its forward pass to its backward pass."""
    if part.engine == "store":  # of what enters, the first norm has a stream already
        return sum(first.kept + second.kept for first, second in layers) + entering - sizes.stream_bytes
    order = sum(first.order for first, _ in layers) // (8 if sizes.seq <= 2**15 else 4)  # one small integer of two large ones
    # `invert`: both streams, later one that is being derived.
    state = _state(config, sizes)
    return order + entering + (state if part.engine == "invert" else (-(-len(layers) // part.every) - 1) * state)


def _inverted(config: Config, layers: Sequence[Layer], sizes: Sizes, standing: int) -> int:
    """The most that is alive while layers' gradients are taken whose inputs are derived from what comes after.

    What a norm reads is a stream, which stands already (momentum derives it from both; an RMS norm keeps its own of 16 bits).
    """
    stack, stream = config.model.stack, sizes.stream_bytes
    apart = "momentum" in stack.coupling or (config.model.norm == "rmsnorm" and sizes.stream == 2)
    beside = _beside(config, sizes)
    later = 0 if derived.stack_output(stack) == "concat" else beside  # both halves go with the last layer
    if len(layers) < 3 and stack.coupling == "additive" and derived.stack_output(stack) != "concat":
        # The last feed-forward has one gradient of both streams, and nobody needs what was before the first.
        later -= stream
    standing -= 0 if apart else stream
    return max(standing + max(a.kept + a.work + a.result + beside, b.kept + b.work + b.result + later) for a, b in layers)


def _checkpointed(config: Config, layers: Sequence[Layer], every: int, sizes: Sizes, entering: int, standing: int) -> int:
    """The same for layers that are run again, `every` at a time, the last ones first. What enters a segment is kept already: what
    the segment's first norm reads of it does not count twice, and what nobody reads goes."""
    most, state = 0, _state(config, sizes)
    for first in reversed(range(0, len(layers), every)):
        run = layers[first : first + every]
        came = state if first else entering
        # The affine coupling reads the other stream as well, unless both are one tensor; a half of a tensor keeps the whole.
        halves = not first and derived.stack_input(config.model.stack) == "split"
        other = came - sizes.stream_bytes if affine(config) or halves else 0
        inside = sum(a.kept + b.kept for a, b in run)
        most = max(most, _walk(run, standing - came + other + inside, _beside(config, sizes)))
        standing -= came + sum(a.order for a, _ in run) // 8
    return most


def _walk(layers: Sequence[Layer], standing: int, beside: int) -> int:
    """The most that is alive while these layers' gradients are taken, the last first, with `standing` bytes at its beginning, and
    `beside` them once the streams have gradients of their own (at first they share one)."""
    most = 0
    for first, second in reversed(layers):
        most = max(most, standing + second.work, standing - second.kept + first.work + beside)
        standing -= first.kept + second.kept
    return most


def _beside(config: Config, sizes: Sizes) -> int:
    """The gradient that both streams had at first, where it stays: that of the stack's input if the result takes the input away
    again, and that of both streams side by side until both halves have been replaced."""
    stack = config.model.stack
    waits = stack.kind == "reversible" and derived.stack_output(stack) in ("sum-minus-input", "concat")
    return sizes.stream_bytes if waits else 0


def _chunk(config: Config, vocab: int) -> int:
    """Tokens whose loss is taken at once; 0 for all."""
    tokens, chunk = config.batch.micro * config.model.seq, config.memory.loss_chunk
    chunk = automatic_chunk(tokens, vocab) if chunk is None else chunk
    return chunk if 0 < chunk < tokens else 0


def _loss(config: Config, hidden: int, vocab: int) -> Tuple[int, int]:
    """(while the loss is computed, while its gradient is handed on)."""
    sizes = Sizes(config)
    if config.model.head == "classifier":
        rows = 12 * sizes.micro * expected_classes(config)
        return rows, rows
    tokens, chunk = config.batch.micro * config.model.seq, _chunk(config, vocab)
    if not chunk:
        return tokens * 8 * vocab, tokens * 12 * vocab  # in fp32: logits, their log-softmax, and a gradient
    # While a chunk's gradient is made: logits as they come, in fp32, and the gradient (in fp32 in one place); later the first and
    # the last, beside the gradient of the readout as it is made and handed on. All chunks' sum of it is in fp32.
    logits, left = (4 if sizes.element == 4 else 8) * vocab, 4 * vocab
    matrix, weight = vocab * hidden, sizes.weight
    made = weight if sizes.element == weight else weight + sizes.element
    begin = 4 * matrix + max(chunk * logits, chunk * left + made * matrix)
    return begin + tokens * hidden * sizes.stream, 2 * matrix * weight


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
    # The affine coupling's scale, which comes after the rest of a branch.
    scale = element * sizes.width**2 if affine(config) and (mixed or derived.depth_mult(config) != 1.0) else 0
    again = 2 * scale if mixed and derived.depth_mult(config) != 1.0 else 0  # multiplied in fp32 before it is cast
    if shared and derived.depth_mult(config) == 1.0:
        cached, scale = cached + 2 * scale, 0
    # Joined and scaled in fp32 before they are cast: one such matrix is alive for a moment.
    passing = (4 * inputs * square if mixed and one else 0, 4 * matrix if mixed and multiplied else 0)
    joining = element * inputs * square + passing[0] if one else 0  # before the output's matrix is there
    heads = config.memory.attention_heads_at_once
    pieces, chunked = sizes.in_pieces(config, kind), config.memory.ffn_chunk > 0
    kept = (0 if pieces else attended) + (0 if chunked else fed + scale) + scale
    # The feed-forward's copies come after the attention's, and go before them.
    attending = attended * min(heads, sizes.heads) // sizes.heads if pieces else max(joining - attended, 0)
    last = max(passing[1], scale + again)
    feeding = fed + last if chunked else max(0, last - scale)
    beside = max(attending - scale - (0 if chunked else fed + scale), feeding)
    return _Copies(kept, beside, max(joining, attended + scale + again, fed + last), cached)


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
