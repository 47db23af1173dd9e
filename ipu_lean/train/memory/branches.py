"""The two branches of a layer by formula: what each keeps for its gradients, and what it needs while they are taken, in bytes of
one micro-batch.

T tokens (padded to whole chunks), width d, a = heads x head size inside the attention, f inside the feed-forward, s bytes of a
number in the residual stream, e of one in a matrix product; R rounds of hashing, S scores (T x heads x keys of a query, of all
rounds):

    norm            s d, its output e d (rmsnorm: 8 d, e d)
    attention       q k v 3 e a (hashed 2 e a) and output e a
    written out     full: weights e S; local and hashed: weights 4 S (and e S if 16 bits), keys and values of all windows; hashed
                    also masks 2 S and queries in their order, and of several rounds scores 4 S and the rounds' outputs
    hashed          who stands where and back, 16 T heads R; recomputing engines keep it as 2 T heads R (4 beyond 2^15 tokens)
    feed-forward    before and after the activation 2 e f (4 e f with a gate; after a ReLU only, 1 and 3 e f)
    affine          the sigmoid of the scale e d; with autocast also the scale's input, cast once more, e d
"""

from __future__ import annotations

from typing import NamedTuple, Tuple

from ipu_lean.config import Config, derived, layer_kinds
from ipu_lean.nn.attention.blockwise import plan
from ipu_lean.nn.attention.windows import BLOCK_BYTES
from ipu_lean.train.memory.sizes import Sizes, affine, joined, masked, scaled

GATED = ("geglu", "swiglu", "reglu")


class Branch(NamedTuple):
    """Bytes of a branch.

    kept: for its gradients. work: what else is alive while they are taken. order: of `kept`, what engines that run the branch
    again cannot find again and keep (in fewer bits). result: what `invert`, which undoes the branch with its result, needs beside
    `work` where that is put together from pieces.
    """

    kept: int
    work: int
    order: int = 0
    result: int = 0


def attention(config: Config, kind: str) -> Branch:
    """The attention branch of a layer of this kind (`full`, `local` or `lsh`)."""
    sizes = Sizes(config)
    both, square = sizes.doubled(config), sizes.width * sizes.inside
    if sizes.in_pieces(config, kind):
        at_once = config.memory.attention_heads_at_once
        piece, summed = Sizes(config).of_heads(at_once), at_once < sizes.heads
        found = _full(config, piece)
        number = sizes.micro * sizes.heads // (piece.micro * piece.heads)
        # Every piece adds its own to the gradients of the matrices. The scale is outside, with a norm of its own.
        read = sizes.tokens * sizes.width * sizes.element if affine(config) else 0
        around, result = sizes.pieces(config, number, 4 * square * sizes.weight, summed)
        if summed:  # all heads read the same, which a norm has made of all tokens, and add up its gradient
            around += sizes.width * sizes.element * sizes.tokens
        work = around + both.work + piece.norm(config) - piece.stream_bytes + found.kept + found.work
        return Branch(sizes.stream_bytes + both.kept + read, work, result=result)
    found = {"full": _full, "local": _local, "lsh": _lsh}[kind](config, sizes)
    around, ending = sizes.norm(config) + both.kept, sizes.ending(config)
    # Inside, or before that, when the gradient of the last matrix is taken.
    work = max(found.work, sizes.handed(config) + sizes.element * (sizes.tokens * sizes.inside + square))
    return Branch(around + ending + found.kept, sizes.streams(config) + work + both.work - ending, found.order)


def feed_forward(config: Config) -> Branch:
    """The feed-forward branch; with memory.ffn_chunk what is kept in between is made again, for some tokens at a time."""
    sizes, up = Sizes(config), 2 if config.model.activation in GATED else 1
    chunk = min(config.memory.ffn_chunk or sizes.tokens, sizes.tokens)
    # What a ReLU's gradient reads is its output, which the next product reads as well.
    shared = config.model.activation in ("relu", "reglu")
    between = (2 * up - shared) * sizes.element * sizes.ffn * chunk
    both, handed = sizes.doubled(config), sizes.handed(config)
    # Gradients of what lies around the activation; one of them and that of the last matrix; or that one as autocast and the depth
    # rule's number hand it on, when what the matrix read is gone.
    inner, matrix = sizes.ffn * sizes.element * chunk, sizes.width * sizes.ffn
    made = 8 if sizes.mixed and scaled(config) else sizes.made
    if chunk < sizes.tokens:
        # The whole result's gradient is there all the time, and the sums of the pieces' gradients of the matrices.
        around, result = sizes.pieces(config, -(-sizes.tokens // chunk), (up + 1) * sizes.weight * matrix)
        piece = (sizes.norm(config) - sizes.stream_bytes + both.waiting) * chunk // sizes.tokens
        work = max(up * inner, inner + sizes.element * matrix, made * matrix)
        work += around + handed - both.sigmoid + piece + between
        return Branch(sizes.stream_bytes + both.sigmoid, work, result=result)
    work, ending = max(up * inner, handed + inner + sizes.element * matrix, made * matrix) + both.work, sizes.ending(config)
    return Branch(sizes.norm(config) + ending + between + both.kept, sizes.streams(config) + work - ending)


def _full(config: Config, sizes: Sizes) -> Branch:
    model, element, made = config.model, sizes.element, sizes.matrix(config, "full")
    plain = sizes.tokens * sizes.inside * element
    scores = sizes.tokens * sizes.heads * sizes.seq
    if derived.attention(config) == "explicit":
        # On a GPU autocast takes the softmax in fp32, and casts its result.
        each = 6 if config.device == "gpu" and sizes.mixed else element
        if model.attention_dropout:
            drawn = 1 if config.device == "gpu" else element
            return Branch(5 * plain + scores * (each + drawn + element), 2 * plain + element * scores)
        # Gradients before and after the softmax, when output and values are gone; or those of q, k and v, when weights are too.
        return Branch(5 * plain + scores * each, max(2 * element * scores - plain, 2 * plain + made - each * scores))
    # A mask of keys is as large as the causal one it is added to.
    mask = element * sizes.tokens * (sizes.seq if model.causal else 1) if masked(config) else 0
    if model.attention_dropout and config.device == "cpu":
        return Branch(4 * plain + mask + _dropped(sizes, scores), 2 * plain + 4 * scores)
    if joined(config, "full"):
        return Branch(4 * plain, max(4 * plain + _blockwise(config, sizes, plain), made))
    return Branch(4 * plain + mask, max(4 * plain, made))


def _dropped(sizes: Sizes, scores: int) -> int:
    """What torch's attention keeps on a CPU where weights are dropped, all in fp32: weights, the mask and what is left of the
    weights, and of 16 bits queries, keys and values."""
    return 12 * scores + (0 if sizes.element == 4 else 12 * sizes.tokens * sizes.inside)


def _blockwise(config: Config, sizes: Sizes, plain: int) -> int:
    """What blockwise.py needs in its backward pass for a group of heads: q, k, v and their gradients, the rotation of two of
    these (in fp32), or scores of a block."""
    block, rows, heads = plan(sizes.micro, sizes.seq, sizes.heads, sizes.element)
    group = plain * rows * heads // (sizes.micro * sizes.heads)
    turned = (6 if sizes.element == 4 else 18) * group if config.model.positions == "rotary" else 0
    return 6 * group + max(turned, 3 * sizes.element * rows * heads * min(block, sizes.seq) * sizes.seq)


def _local(config: Config, sizes: Sizes) -> Branch:
    local = config.model.local
    whole = sizes.seq <= local.chunk
    looks = 1 if whole else local.before + 1 + local.after
    window = sizes.seq if whole else looks * local.chunk
    plain = sizes.tokens * sizes.inside * sizes.element
    if _by_blocks(config):
        scratch = _scratch(sizes, window, sizes.seq, window // looks, looks - 1, 1 if sizes.element == 4 else 5)
        return Branch(4 * plain, max(4 * plain + scratch, sizes.matrix(config, "local")))
    kept, early = _written_out(config, sizes, sizes.tokens * sizes.heads * window)
    late = plain * (1 + 2 * looks) - kept
    return Branch(kept + plain * (2 + 2 * looks), max(early, late) - plain)


def _lsh(config: Config, sizes: Sizes) -> Branch:
    lsh = config.model.lsh
    plain, element, made = sizes.tokens * sizes.inside * sizes.element, sizes.element, sizes.matrix(config, "lsh")
    wide = 4 * sizes.tokens * sizes.inside if element == 2 else 0  # of queries, for the length of keys
    if sizes.seq <= max(lsh.chunk, layer_kinds.full_below(config.model)):
        return _not_hashed(config, sizes, plain, wide)
    rounds, looks = lsh.hashes, lsh.before + 1 + lsh.after
    placed = sizes.tokens * sizes.heads * rounds
    order = 16 * placed
    sums = 4 * placed if rounds > 1 else 0
    if _by_blocks(config):
        places = sizes.seq * rounds
        scratch = _scratch(sizes, looks * lsh.chunk, places, lsh.chunk, looks - 1, 4)
        by_token = 3 * 4 * sizes.seq * sizes.inside // sizes.heads
        return Branch(3 * plain + order + sums, max(3 * plain + scratch + by_token, made), order)
    scores = placed * looks * lsh.chunk
    kept, early = _written_out(config, sizes, scores)
    late = 2 * looks * rounds * plain - kept
    kept += 2 * scores + order + 3 * plain + rounds * (plain * (2 + 2 * looks) + wide)
    if rounds > 1:  # logarithms of sums read the scores
        kept, early = kept + 4 * scores + 2 * sums, early + 4 * scores
    return Branch(kept, max(early, late) - rounds * plain, order)


def _not_hashed(config: Config, sizes: Sizes, plain: int, wide: int) -> Branch:
    """Hashed attention over a sequence that is short enough for all pairs."""
    scores = sizes.tokens * sizes.heads * sizes.seq
    if derived.attention(config) == "explicit" or config.precision == "fp16-mixed":
        kept, work = _written_out(config, sizes, scores)
        return Branch(kept + 5 * plain + wide, work - plain)
    mask = sizes.element * sizes.seq * (sizes.tokens if masked(config) else sizes.seq)
    if config.model.attention_dropout and config.device == "cpu":
        return Branch(4 * plain + wide + mask + _dropped(sizes, scores), 2 * plain + 4 * scores)
    return Branch(4 * plain + wide + mask, max(4 * plain, sizes.matrix(config, "lsh")))


def _by_blocks(config: Config) -> bool:
    """Whether local and hashed attention run in blocks that keep no scores (windows.py), as they do on a CPU."""
    return config.device == "cpu" and derived.attention(config) == "fused"


def _written_out(config: Config, sizes: Sizes, scores: int) -> Tuple[int, int]:
    """(kept, work) of so many scores in chunks.py: weights in fp32, and cast for the product with values, whose gradient comes
    first."""
    cast = 0 if sizes.element == 4 else 2 * scores
    kept = 4 * scores + cast
    if config.model.attention_dropout:
        kept += scores * (1 if config.device == "gpu" else 4) + (4 * scores if sizes.element == 4 else 0)
    return kept, 8 * scores - cast


def _scratch(sizes: Sizes, window: int, places: int, chunk: int, around: int, rows: int) -> int:
    """Buffers of one head's backward pass: gradients by place, two blocks of scores, and so many copies of a block's rows."""
    size = sizes.inside // sizes.heads
    block = min(places, max(BLOCK_BYTES // (window * 4), chunk))
    return 4 * size * (3 * places + 2 * around * chunk) + 8 * block * window + rows * 4 * size * (block + around * chunk)
