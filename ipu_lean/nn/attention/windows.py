"""Windows of keys for chunks of queries on CPU: how places are cut in blocks that fit the cache, and what may be seen in them.

Tokens stand at places: in the order of their buckets, round after round (lsh_fused.py), or in their own (local_fused.py). The
places are extended at both ends by the circular neighbours, so a chunk and its neighbours are one window of consecutive rows,
and the windows of a block are overlapping views: nothing is copied for looking around. Masks are one ceiling on the scores, made
from positions.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Tuple

import torch

from ipu_lean._compat import compiling, overwrites
from ipu_lean.nn.attention.chunks import HIDDEN, OWN, Terms
from ipu_lean.nn.transforms import transformed

BLOCK_BYTES = 2**19  # of scores in a block
STEP = 2.0**17  # between the ceilings of neighbouring positions; with it they are exact in float32 for millions of positions
LONGEST = 2**22
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def applies(*inputs: torch.Tensor) -> bool:
    """Whether the fused functions can do a call on queries, keys and values `[batch, seq, heads, head_size]`: of one type, on
    CPU, outside of torch.func transforms, of torch.compile and of tracing."""
    first = inputs[0]
    if compiling() or torch.jit.is_tracing() or first.numel() == 0 or first.shape[1] > LONGEST:
        return False
    return first.dtype in TYPES and all(
        type(x) in _PLAIN and x.device.type == "cpu" and x.dtype == first.dtype and not transformed(x) for x in inputs
    )


class Layout(NamedTuple):
    """How places are cut: `chunks` of `chunk` places, each seeing `before` and `after` chunks around it."""

    chunk: int
    before: int
    after: int
    chunks: int

    @staticmethod
    def of(terms: Terms, places: int) -> Layout:
        """Of so many places, whole chunks."""
        return Layout(terms.chunk, terms.before, terms.after, places // terms.chunk)

    @property
    def window(self) -> int:
        """Keys that a query is compared with."""
        return (self.before + 1 + self.after) * self.chunk

    def extended(self, places: torch.Tensor) -> torch.Tensor:
        """`[places, ...]` with the neighbours of both ends, `[(before + chunks + after) * chunk, ...]`."""
        if not self.before and not self.after:
            return places
        total = self.chunks * self.chunk
        around = torch.arange(-self.before * self.chunk, total + self.after * self.chunk, device=places.device)
        return places.index_select(0, around.remainder_(total))

    def blocks(self, bytes_each: int) -> List[Tuple[int, int]]:
        """(first, last + 1) chunks of each block."""
        each = max(1, BLOCK_BYTES // (self.chunk * self.window * bytes_each))
        return [(first, min(self.chunks, first + each)) for first in range(0, self.chunks, each)]


class Scratch:
    """Buffers by name that are used again for every block: fresh ones would be fresh pages, outside of the cache."""

    def __init__(self, like: torch.Tensor) -> None:
        wide = torch.float32 if like.dtype in (torch.float16, torch.bfloat16) else like.dtype
        self.dtype, self.device = wide, like.device
        self._buffers: Dict[str, torch.Tensor] = {}

    def __call__(self, name: str, *shape: int, dtype: Optional[torch.dtype] = None) -> torch.Tensor:
        """An uninitialised tensor of that shape; the one of the same name before is gone."""
        count = 1
        for size in shape:
            count *= size
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < count:
            fresh = torch.empty if overwrites() else torch.zeros
            buffer = self._buffers[name] = fresh(count, dtype=dtype or self.dtype, device=self.device)
        return buffer[:count].view(shape)

    def rows(self, name: str, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Rows `at` of `x` `[tokens, head_size]`, in the wider type."""
        if x.dtype != self.dtype:
            return x.index_select(0, at).to(self.dtype)
        return torch.index_select(x, 0, at, out=self(name, at.shape[0], x.shape[1]))


class Masks:
    """Ceilings on the scores of one sequence's head: a score above its ceiling is replaced by it.

    Args:
        terms: of this sequence.
        tokens: by extended place.
        shared: queries and keys are one projection: a token's own key is its last resort.
        in_order: tokens stand in their own order, so that the ceilings of all chunks with neighbours on both sides are alike.
    """

    def __init__(
        self, terms: Terms, layout: Layout, tokens: torch.Tensor, scratch: Scratch, shared: bool, in_order: bool = False
    ) -> None:
        self.causal, self.shared, self.layout, self.scratch = terms.causal, shared, layout, scratch
        self.needed = terms.causal or shared or terms.present is not None
        self.keys = tokens.to(scratch.dtype).mul_(2 * STEP)
        own = self.keys[layout.before * layout.chunk :][: layout.chunks * layout.chunk]
        self.queries = own - STEP if shared else own + STEP
        self.absent = None if terms.present is None else terms.present.index_select(0, tokens).logical_not_()
        self._exact = self.absent is not None or scratch.dtype == torch.float64
        self._inner, self._same = (layout.before, layout.chunks - layout.after), None
        if in_order and self.needed and self.absent is None and self._inner[0] < self._inner[1]:
            self._same = self._ceiling(self._inner[0], self._inner[0] + 1).clone()

    def apply(self, scores: torch.Tensor, first: int, last: int) -> Optional[torch.Tensor]:
        """Lowers `scores` `[last - first, chunk, window]` to their ceilings; returns where, if the gradient of those scores
        must be taken out: it is zero but for rounding, except in rows that are hidden wholly."""
        if not self.needed:
            return None
        if self._same is None:
            ceiling = self._ceiling(first, last)
            torch.minimum(scores, ceiling, out=scores)
            return ceiling < 0 if self._exact else None
        start, stop = (min(max(end, first), last) for end in self._inner)
        for begin, end in ((first, start), (start, stop), (stop, last)):
            if begin < end:
                part = scores[begin - first : end - first]
                ceiling = self._same if begin == start else self._ceiling(begin, end)
                torch.minimum(part, ceiling, out=part)
        return None

    def _ceiling(self, first: int, last: int) -> torch.Tensor:
        layout, size = self.layout, self.layout.chunk
        rows = self.queries[first * size : last * size].view(-1, size, 1)
        columns = windows(self.keys[:, None], layout, first, last).transpose(1, 2)
        ceiling = torch.sub(rows, columns, out=self.scratch("weights", last - first, size, layout.window))
        if self._exact:
            self._exactly(ceiling, first, last)
        elif not self.causal:  # own: -STEP, all others: more than their distance
            ceiling.add_(STEP).abs_().sub_(STEP)
        return ceiling

    def _exactly(self, ceiling: torch.Tensor, first: int, last: int) -> None:
        """Replaces the differences of positions in `ceiling` by infinity, HIDDEN and OWN."""
        own, later = ceiling == -STEP, ceiling < 0
        ceiling.fill_(float("inf"))
        if self.causal:
            ceiling.masked_fill_(later, HIDDEN)
        if self.absent is not None:
            ceiling.masked_fill_(windows(self.absent[:, None], self.layout, first, last).transpose(1, 2), HIDDEN)
        if self.shared:
            ceiling.masked_fill_(own, OWN)


class Dropout:
    """Masks that can be drawn again: a seed from torch's own random numbers, then a generator of our own.

    Sixteen random bits decide on a weight, many times faster than torch's Bernoulli numbers: the share dropped is a multiple of
    2^-16, and what remains is scaled up accordingly.
    """

    def __init__(self, p: float, seed: int) -> None:
        self._limit = min(2**16, max(1, round(p * 2**16)))
        self._generator = torch.Generator(device="cpu")
        self._generator.manual_seed(seed)

    @staticmethod
    def seed(p: float) -> int:
        """Drawn from torch's default generator, so whoever replays that one replays the masks; 0 where nothing is dropped."""
        return int(torch.randint(2**62, ()).item()) if p > 0 else 0

    @staticmethod
    def of(p: float, seed: int) -> Optional[Dropout]:
        """From a `seed` of that method; None where nothing is dropped."""
        return Dropout(p, seed) if p > 0 else None

    def draw(self, scratch: Scratch, shape: torch.Size) -> torch.Tensor:
        """0 where a weight is dropped, else what the others are scaled up by."""
        keep = scratch("keep", *shape)
        if self._limit == 2**16:
            return keep.zero_()
        count = keep.numel()
        bits = scratch("bits", -(-count // 4), dtype=torch.int64).random_(-(2**63), None, generator=self._generator)
        kept = bits.view(torch.int16)[:count] >= self._limit - 2**15
        return keep.copy_(kept.view(shape)).mul_(2**16 / (2**16 - self._limit))


def windows(extended: torch.Tensor, layout: Layout, first: int, last: int) -> torch.Tensor:
    """The windows of chunks first to last - 1 as views, `[last - first, window, features]` of contiguous `[places, features]`."""
    features, size = extended.shape[1], layout.chunk
    start = extended.storage_offset() + first * size * features
    return extended.as_strided((last - first, layout.window, features), (size * features, features, 1), start)
