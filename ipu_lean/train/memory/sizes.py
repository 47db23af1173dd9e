"""Numbers that the formulas of activations share: tokens and widths, bytes of a number, and what stands around a branch."""

from __future__ import annotations

from typing import NamedTuple, Tuple

from ipu_lean.config import Config, derived, layer_kinds
from ipu_lean.nn.attention.blockwise import worthwhile


class Coupled(NamedTuple):
    """Bytes that the affine coupling adds to a branch: the scale's sigmoid, gone when gradients inside the branch are taken, like
    the cast of what the scale's matrix reads; and the gradient that this matrix hands to the branch's norm, which waits there."""

    sigmoid: int
    cast: int
    waiting: int

    @property
    def kept(self) -> int:
        """For gradients."""
        return self.sigmoid + self.cast

    @property
    def work(self) -> int:
        """While gradients inside the branch are taken, beside what is `kept`."""
        return self.waiting - self.kept


class Sizes:
    """Numbers that the formulas share."""

    def __init__(self, config: Config) -> None:
        model = config.model
        self.stream, self.element = 2 if config.precision == "bf16-pure" else 4, 4 if config.precision == "fp32" else 2
        self.micro, self.seq = config.batch.micro, layer_kinds.padded_length(model, model.seq)
        self.tokens = self.micro * self.seq
        self.width, self.ffn = derived.stack_width(model), derived.ffn_width(model)
        self.heads, self.inside = derived.heads(model), derived.attention_width(model)
        self.mixed = config.precision.endswith("mixed")
        self.weight = 2 if config.precision == "bf16-pure" else 4
        # The gradient of a weight while it is made; autocast makes it in 16 bits first.
        self.made = self.weight + (self.element if self.mixed else 0)

    @property
    def stream_bytes(self) -> int:
        """A stream."""
        return self.stream * self.width * self.tokens

    def of_heads(self, at_once: int) -> Sizes:
        """Those of a piece of full attention."""
        size = self.inside // self.heads
        self.micro, self.heads = max(1, at_once // self.heads), min(self.heads, at_once)
        self.tokens, self.inside = self.micro * self.seq, self.heads * size
        return self

    def in_pieces(self, config: Config, kind: str) -> bool:
        """Whether a layer's attention is run again some heads at a time."""
        return kind == "full" and 0 < config.memory.attention_heads_at_once < self.micro * self.heads

    def norm(self, config: Config) -> int:
        """A norm's input and output, as they are kept."""
        return self.tokens * self.width * (self.normed(config) + self.element)

    def normed(self, config: Config) -> int:
        """Bytes that a norm keeps of a number that goes in."""
        return 8 if config.model.norm == "rmsnorm" else self.stream

    def ending(self, config: Config) -> int:
        """What a branch's end keeps, a norm's input and dropout's mask: gone when gradients inside the branch are taken."""
        return self.mask(config) + (self.tokens * self.width * self.normed(config) if config.model.sandwich else 0)

    def streams(self, config: Config) -> int:
        """Gradients of the streams."""
        return (2 if config.model.stack.kind == "reversible" else 1) * self.stream_bytes

    def pieces(self, config: Config, number: int, sums: int, summed: bool = False) -> Tuple[int, int]:
        """(the same of a branch in so many pieces, what comes to it where the branch's result is wanted).

        With what they have put together at the most: the input's gradient, and `sums` of their gradients of the matrices; the
        result is complete, and gone, before the last one's gradients. Results that are `summed` are so in fp32, and the gradient
        comes to each of them like that.
        """
        plane, wide = self.stream_bytes, 4 * self.width * self.tokens
        if summed:
            return self.streams(config) + wide + sums, wide
        last, other = plane * (number - 1) // number + sums, plane + (plane * (number - 2) // number + sums if number > 2 else 0)
        return self.streams(config) + last, max(0, other - last)

    def doubled(self, config: Config) -> Coupled:
        """What the affine coupling's scale adds to a branch; nothing with other couplings."""
        model, plane = config.model, self.width * self.tokens
        if not affine(config):
            return Coupled(0, 0, 0)
        sigmoid = plane * (self.stream if model.sandwich else self.element)  # a norm after the branch gives fp32 under autocast
        return Coupled(sigmoid, plane * self.element if self.mixed else 0, self.stream_bytes)

    def handed(self, config: Config) -> int:
        """The gradient of a branch's result, where it is not a stream's own: of another type, taken again, of twice the width."""
        model, plane = config.model, self.width * self.tokens * self.element
        changed = self.mixed or model.sandwich or model.dropout > 0
        if affine(config):
            return plane if model.sandwich or model.dropout else 2 * plane
        return plane if changed or (model.stack.kind == "reversible" and model.stack.coupling in ("momentum", "mean")) else 0

    def matrix(self, config: Config, kind: str) -> int:
        """The gradient of the attention's largest matrix, which comes when all that was kept is gone."""
        return self.made * self.width * self.inside * ((2 if kind == "lsh" else 3) if joined(config, kind) else 1)

    def mask(self, config: Config) -> int:
        """Of the dropout on a branch's output: CPUs multiply by numbers, GPUs by bits."""
        each = 1 if config.device == "gpu" else self.element
        return self.tokens * self.width * each if config.model.dropout else 0


def affine(config: Config) -> bool:
    """Whether branches give twice their width, a scale and a shift."""
    return config.model.stack.kind == "reversible" and config.model.stack.coupling == "affine"


def scaled(config: Config) -> bool:
    """Whether a branch's last matrix is multiplied by the depth rule's number, which makes a copy of it."""
    return derived.depth_mult(config) != 1.0 and not config.model.sandwich


def joined(config: Config, kind: str) -> bool:
    """Whether query, key and value are multiplied by as one matrix, which is then a copy of them."""
    model, sizes = config.model, Sizes(config)
    if config.device != "cpu" or derived.attention(config) != "fused":
        return False
    if kind != "full":
        return model.positions != "rotary"
    alone = not model.attention_dropout and model.causal and not masked(config)
    return alone and worthwhile(sizes.seq, sizes.element)


def masked(config: Config) -> bool:
    """Whether layers are told which tokens are there: those of texts of any length, and of padded sequences."""
    return config.model.head == "classifier" or Sizes(config).seq != config.model.seq
