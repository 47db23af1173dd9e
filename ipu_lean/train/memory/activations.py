"""Activations by formula: what the backward pass keeps, and what it needs while it works, in bytes of one micro-batch.

T tokens (micro x seq), width d, feed-forward f, s bytes of a number in the residual stream, e of one in a matrix product:

    a layer    norm input s d, its output e d, q k v 3 e d, attention output e d; norm input s d, its output e d, before and after
               the activation 2 e f (4 e f with a gate); written-out attention also has its weights, heads x seq
    kept       `store`: all layers; `checkpoint`: what enters each segment, and one segment's layers; `invert`: the streams, and
               one branch
    loss       logits, softmax and gradient of the tokens that are alive at once; in chunks also the readout's gradient in fp32
"""

from __future__ import annotations

from typing import Optional, Tuple

from ipu_lean.config import Config, derived
from ipu_lean.nn.attention.blockwise import worthwhile
from ipu_lean.nn.loss import automatic_chunk

FULL = ("auto", "explicit", "fused", "full")
GATED = ("geglu", "swiglu", "reglu")


def widths(config: Config) -> Tuple[int, int]:
    """(s, e): bytes of a number in the residual stream, and of one in a matrix product."""
    pure = config.precision == "bf16-pure"
    return 2 if pure else 4, 4 if config.precision == "fp32" else 2


def activation_bytes(config: Config, vocab: int) -> Optional[int]:
    """The peak beside weights, gradients and copies of weights; None for networks that this formula does not know."""
    if config.model.kind == "mlp":
        return _mlp(config, vocab)
    known = config.model.attention in FULL and config.model.head != "classifier"
    return _gpt(config, vocab) if known else None


def copy_bytes(config: Config, vocab: int) -> Optional[int]:
    """Copies of weights that are alive at once: casts to 16 bits (autocast), matrices joined to one or scaled by a depth rule.

    The backward pass needs them, so `store` keeps those of all layers; other engines make them again, a branch at a time. None
    for kinds of attention that this formula does not know.
    """
    mixed, model, (_, element) = config.precision.endswith("mixed"), config.model, widths(config)
    if model.kind == "mlp":
        return 2 * (((model.features or 0) + (model.depth - 1) * model.width + vocab) * model.width) if mixed else 0
    if model.attention not in FULL:
        return None
    width, ffn = derived.stack_width(model), derived.ffn_width(model)
    square, matrix, joined = width * width, width * ffn, _joined(config)
    scaled = derived.depth_mult(config) != 1.0 and not model.sandwich
    attention = (3 * square if mixed or joined else 0) + (square if mixed or scaled else 0)
    up = 2 if model.activation in GATED else 1
    feed_forward = (up * matrix if mixed else 0) + (matrix if mixed or scaled else 0)
    # Joined and scaled in fp32 before they are cast: one such matrix is alive for a moment.
    passing = (4 * 3 * square if mixed and joined else 0, 4 * matrix if mixed and scaled else 0)
    joining = element * 3 * square + passing[0]  # before the output's matrix is there
    at_once = max(joining if joined else 0, element * attention, element * feed_forward + passing[1])
    kept = repeated = 0
    for layers, engine, every in _parts(config):
        if engine == "store":
            kept += layers * element * (attention + (0 if config.memory.ffn_chunk else feed_forward))
            repeated = max(repeated, at_once if config.memory.ffn_chunk else 0)
        elif engine == "checkpoint":
            repeated = max(repeated, min(every, layers) * element * (attention + feed_forward) + max(passing))
        else:
            repeated = max(repeated, at_once)
    readout = element * derived.hidden_width(model) * vocab if mixed else 0
    return max(kept + repeated, kept + readout)


def _parts(config: Config) -> Tuple[Tuple[int, str, int], ...]:
    """(layers, engine, checkpoint_every) of each part of the stack."""
    return derived.segments(config) or ((config.model.depth, derived.engine(config), config.memory.checkpoint_every),)


def _joined(config: Config) -> bool:
    """Whether query, key and value are multiplied by as one matrix, which is then a copy of the three (blockwise attention)."""
    model = config.model
    here = config.device == "cpu" and derived.attention(config) == "fused" and not model.attention_dropout and model.causal
    return here and worthwhile(model.seq, widths(config)[1])


def _gpt(config: Config, vocab: int) -> int:
    model, tokens = config.model, config.batch.micro * config.model.seq
    stream, element = widths(config)
    width, ffn, hidden = derived.stack_width(model), derived.ffn_width(model), derived.hidden_width(model)
    state = (2 if model.stack.kind == "reversible" else 1) * width * stream * tokens
    attention, feed_forward, inner = _branches(config, tokens)
    kept, alive = _kept(config, state, attention, feed_forward, inner)
    # Gradients in flight: of the stream, and of what lies around the activation; and a weight's own gradient while it is made.
    up = 2 if model.activation in GATED else 1
    chunk = min(config.memory.ffn_chunk or tokens, tokens)
    weight = 2 if config.precision == "bf16-pure" else 4
    made = 2 * weight if config.precision.endswith("mixed") else weight  # through a cast
    work = 2 * stream * width * tokens + (1 + up) * ffn * element * chunk + made * width * ffn
    begin, later = _loss(config, tokens, hidden, vocab)
    # A tied matrix waits for the embedding's part of its gradient; in the end there are both and their sum.
    matrix, tied = weight * vocab * model.width, derived.tied(model)
    ends = 2 * tokens * hidden * stream
    during = max(kept + ends + begin, kept + alive + (matrix if tied else 0) + work, kept + ends + later)
    end = (3 if tied else 1) * matrix
    return end if end > during + (copy_bytes(config, vocab) or 0) else during  # of copies of weights nothing is left at the end


def _branches(config: Config, tokens: int) -> Tuple[int, int, int]:
    """What the two branches of a layer keep for their gradients, the second one without and then around its activation."""
    model = config.model
    stream, element = widths(config)
    width, ffn = derived.stack_width(model), derived.ffn_width(model)
    attention = tokens * width * (stream + 5 * element)
    if derived.attention(config) == "explicit":
        scores = tokens * derived.heads(model) * model.seq
        # On a GPU autocast takes the softmax in fp32, and casts its result.
        twice = config.device == "gpu" and config.precision.endswith("mixed")
        attention += scores * (6 if twice else element) + tokens * width * element
    chunk = min(config.memory.ffn_chunk or tokens, tokens)
    inner = (4 if model.activation in GATED else 2) * element * ffn
    feed_forward = tokens * width * (stream + element)
    masks = tokens * width if model.dropout else 0
    extra = tokens * width * element if model.sandwich else 0
    return attention + masks + extra, feed_forward + masks + extra, chunk * inner


def _kept(config: Config, state: int, attention: int, feed_forward: int, inner: int) -> Tuple[int, int]:
    """(kept through the whole forward pass, alive beside it while gradients are taken)."""
    pieces = config.memory.ffn_chunk > 0  # made again, one at a time
    layer = attention + feed_forward + (0 if pieces else inner)
    kept, alive = 0, inner if pieces else 0
    for layers, engine, every in _parts(config):
        if engine == "store":
            kept += layers * layer
        elif engine == "checkpoint":
            kept += -(-layers // every) * state
            alive = max(alive, min(every, layers) * layer + (inner if pieces else 0))
        else:
            kept += 2 * state
            alive = max(alive, state + max(attention, feed_forward + inner))
    return kept, alive


def _loss(config: Config, tokens: int, hidden: int, vocab: int) -> Tuple[int, int]:
    """(while the loss is computed, while its gradient is handed on)."""
    stream, element = widths(config)
    chunk = config.memory.loss_chunk
    chunk = automatic_chunk(tokens, vocab) if chunk is None else min(chunk, tokens)
    if not 0 < chunk < tokens:
        return tokens * 8 * vocab, tokens * 12 * vocab  # in fp32: logits, their log-softmax, and a gradient
    logits = (4 if element == 4 else 8) * vocab  # as they come, in fp32, and their gradient
    matrix, weight = vocab * hidden, 2 if config.precision == "bf16-pure" else 4
    made = weight if element == weight else weight + element
    return chunk * logits + matrix * (4 + made) + tokens * hidden * stream, 2 * matrix * weight


def _mlp(config: Config, vocab: int) -> int:
    stream, element = widths(config)
    rows, model = config.batch.micro, config.model
    weight = 2 if config.precision == "bf16-pure" else 4
    kept = rows * model.width * 2 * element * model.depth + rows * (model.features or 0) * element
    largest = max(model.features or 0, model.width, vocab) * model.width
    return kept + rows * vocab * 12 + 2 * rows * model.width * stream + largest * weight
