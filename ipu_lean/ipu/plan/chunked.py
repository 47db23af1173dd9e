"""What a layer of local or hashed attention needs for its gradients, written out as PopTorch runs it.

The coefficients were read off traced layers (ipu/emulator/stages.py) in both number types: scores and their softmax are float32
in either; a hashed layer masks by positions that depend on data, so two bool masks a score stay, and each round has its own rows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Chunked:
    """One layer's attention among chunks.

    Attributes:
        hashed: by buckets, with shared queries and keys; else local. heads, inner: all heads' features together.
        keys: scores of a token in one head and round. window: chunks that a chunk sees; 1 without chunks. rounds: of hashing.
    """

    hashed: bool
    heads: int
    inner: int
    keys: int
    window: int = 1
    rounds: int = 1

    @property
    def scores(self) -> int:
        """Of one token, over all heads and rounds."""
        return self.heads * self.keys * self.rounds

    def working(self, size: int) -> int:
        """Bytes a token while gradients of the softmax are taken. `size`: bytes of a weight or activation."""
        copies = 2 * size * self.window * self.inner * self.rounds
        if not self.hashed:
            return 12 * self.scores + copies + 2 * size * self.inner
        rows = 2 * size + 10 if self.rounds == 1 else 23 * self.rounds + 3 * size
        return 14 * self.scores + copies + rows * self.inner

    def kept(self, size: int) -> int:
        """Bytes a token that stay until then while the feed-forward's gradients are taken."""
        copies = 2 * size * self.window * self.inner * self.rounds
        each = 4 if size == 4 else 6  # softmax in float32, and once more in 16 bits for the product
        if not self.hashed:
            return each * self.scores + copies + 4 * size * self.inner
        rows = 5 * size + 10 if self.rounds == 1 else (size + 26) * self.rounds + 5 * size
        return (each + 2) * self.scores + copies + rows * self.inner

    @property
    def order(self) -> int:
        """Bytes a token of the order that a surrogate step keeps from one walk to the other."""
        return 2 * self.heads * self.rounds if self.hashed else 0

    @property
    def work(self) -> int:
        """Operations a token of its two products."""
        return 4 * self.keys * self.rounds * self.inner
