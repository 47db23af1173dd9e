"""Locality-sensitive hashing of queries, which says who is likely to attend to whom (Kitaev et al. 2020; Andoni et al. 2015).

A token's bucket is the axis that its randomly rotated query lies nearest to. Nothing here has a gradient.
"""

from __future__ import annotations

import hashlib
from typing import Callable, Dict, Optional, Sequence, Tuple, Union

import torch

from ipu_lean.config.layer_kinds import automatic_buckets
from ipu_lean.errors import ConfigError
from ipu_lean.nn.attention import host
from ipu_lean.nn.positions.table import PositionTable

Buckets = Union[None, int, Sequence[int]]


def bucket_factors(seq: int, chunk: int, buckets: Buckets = None, longest: Optional[int] = None) -> Tuple[int, ...]:
    """The factors whose product is the number of buckets for a sequence of `seq` tokens.

    Args:
        buckets: as configured; None: about two buckets a chunk, rounded down to a power of two, and in two factors where it is
            more than 2 max(sqrt(longest / chunk), chunk), as in the published code.
        longest: the longest sequence of the model (None: `seq`).

    Raises ConfigError unless every factor is even: a rotation gives an axis in both directions.
    """
    if buckets is not None:
        factors = (buckets,) if isinstance(buckets, int) else tuple(buckets)
        if not factors or any(factor < 2 or factor % 2 for factor in factors):
            raise ConfigError("bucket counts (factors) are even numbers, at least 2", key="model.lsh.buckets", value=buckets)
        return factors
    return automatic_buckets(seq, chunk, longest or seq)


def columns_needed(longest: int, chunk: int, buckets: Buckets = None) -> int:
    """Columns of a rotation that serve every sequence up to `longest` tokens: half the sum of the factors."""
    lengths = [chunk * 2**power for power in range(max(longest // chunk, 1).bit_length())]
    return max(sum(bucket_factors(seq, chunk, buckets, longest)) // 2 for seq in lengths)


class Rotations(PositionTable):
    """The random matrices `rotations` `[heads, head_size, hashes, columns]`, normal(0, 1), as a non-persistent buffer.

    They come from a generator of their own that starts from (seed, layer, step): torch's random numbers are left alone, and a
    resumed run draws the same. More rounds leave the first ones as they are.
    """

    rotations: torch.Tensor
    not_computed_with = ("seed", "layer", "step")  # they decide the buffer's numbers, not what is done with them

    def __init__(self, heads: int, head_size: int, hashes: int, columns: int, seed: int, layer: int) -> None:
        super().__init__(columns)
        self.heads, self.head_size, self.hashes = heads, head_size, hashes
        self.seed, self.layer, self.step = seed, layer, 0
        self._register()

    def tables(self) -> Dict[str, torch.Tensor]:
        """Float64 on CPU."""
        return {"rotations": self.drawn(self.step)}

    def drawn(self, step: int) -> torch.Tensor:
        """The matrices of update `step`, float64 on CPU; the buffer is neither read nor written."""
        name = f"{self.seed} {self.layer} {step}".encode()
        generator = torch.Generator(device="cpu")
        generator.manual_seed(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 1)
        shape = (self.hashes, self.heads, self.head_size, self.seq)
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
        return drawn.permute(1, 2, 0, 3).contiguous()

    def redraw(self, step: int) -> None:
        """Those of update `step`, written into the same buffer."""
        self.step = step
        if not self.rotations.is_meta:
            with torch.no_grad():
                self.rotations.copy_(self.drawn(step))

    def set_hashes(self, hashes: int) -> None:
        """Another number of rounds."""
        self.hashes = hashes
        like = self.rotations
        self.rotations = self.tables()["rotations"].to(like.device, like.dtype)

    def like(self, x: torch.Tensor) -> torch.Tensor:
        """The matrices where `x` is, in its type."""
        self._ready(x.device)
        return self.rotations.to(x.dtype)


def hash_buckets(
    qk: torch.Tensor, rotations: torch.Tensor, factors: Sequence[int], present: Optional[torch.Tensor] = None
) -> Tuple[torch.Tensor, int]:
    """Buckets `[batch, heads, hashes, seq]` of queries `[batch, seq, heads, head_size]`, int64, and how many there are.

    Args:
        rotations: `[heads, head_size, hashes, at least sum(factors) / 2]`; the leading columns are used.
        factors: see `bucket_factors`. The digit of the first one counts 1, that of the second one the first factor.
        present: bool `[batch, seq]`; absent tokens go to a last bucket of their own, which is there even if all are present,
            so that shapes do not depend on data.
    """
    columns = sum(factors) // 2
    assert rotations.shape[-1] >= columns, f"rotations have {rotations.shape[-1]} columns, {columns} are needed"
    heads, size, hashes, _ = rotations.shape
    batch = qk.shape[0]
    weight = torch.Size(factors).numel()
    with torch.no_grad():
        flat, qk = rotations[..., :columns].reshape(heads, size, hashes * columns), qk.detach()
        if host.usable(qk):
            tokens = host.tokens_at_once(batch * heads * hashes * columns * qk.element_size())
            parts = [_buckets(part, flat, hashes, factors, host.nearest_axis) for part in qk.split(tokens, 1)]
            buckets = torch.cat(parts, -1)
        else:
            buckets = _buckets(qk, flat, hashes, factors, _nearest_axis)
        if present is None:
            return buckets, weight
        return buckets.masked_fill(present.logical_not()[:, None, None, :], weight), weight + 1


def _buckets(
    qk: torch.Tensor, flat: torch.Tensor, hashes: int, factors: Sequence[int], nearest: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """int64 `[batch, heads, hashes, seq]` of queries `[batch, seq, heads, head_size]` and rotations `[heads, head_size, hashes *
    columns]`."""
    turned = torch.matmul(qk.transpose(1, 2), flat).transpose(2, 3).contiguous()
    turned = turned.view(*turned.shape[:2], hashes, -1, turned.shape[-1])
    buckets, start, weight = None, 0, 1
    for factor in factors:
        digit = nearest(turned[..., start : start + factor // 2, :]).long()
        buckets = digit if buckets is None else buckets + weight * digit
        start, weight = start + factor // 2, weight * factor
    assert buckets is not None
    return buckets


def _nearest_axis(axes: torch.Tensor) -> torch.Tensor:
    """As `host.nearest_axis`, in operations that PopTorch has; it hands the dimension of an argmax on as it is."""
    dim = axes.dim() - 2
    return torch.cat([axes, -axes], dim).argmax(dim)
