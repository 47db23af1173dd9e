"""What the modules of local and of LSH attention have in common: their arguments' rules, and all but the attention itself."""

from __future__ import annotations

from typing import Callable, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.nn.attention.cache import KVCache
from ipu_lean.nn.attention.chunks import Terms
from ipu_lean.nn.attention.full import IMPLEMENTATIONS, untouched
from ipu_lean.nn.positions.rotary import Rotary, rotate
from ipu_lean.nn.precision import as_matmul_input


class ChunkedSelfAttention(nn.Module):
    """`[batch, seq, width] -> [batch, seq, width]`: projections into heads, attention in chunks, a projection back.

    Subclasses bring what is declared here:
        projections: into heads, that of the values last.
        attended: from what `projected` gives, `present`, and `packed` (the heads as one tensor, or None): the attention's output
            `[batch, seq, heads, head_size]`.
        continued: the same from `x`, `present` and a cache.
    """

    projections: Tuple[nn.Module, ...]
    attended: Callable[..., torch.Tensor]
    continued: Callable[..., torch.Tensor]
    out: nn.Module
    heads: int
    head_size: int
    chunk: int
    before: int
    after: int
    causal: bool
    attention_dropout: float
    positions: Optional[Rotary]

    def set_implementation(self, implementation: str) -> None:
        """`explicit`, `fused` or `torch`."""
        self.implementation = checked_implementation(implementation)

    def forward(
        self,
        x: torch.Tensor,
        present: Optional[torch.Tensor] = None,
        cache: Optional[KVCache] = None,
        mask: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """`[batch, seq, width] -> [batch, seq, width]`.

        Args:
            present: bool `[batch, seq]`, True where a token stands: the others are never attended to.
            cache: what is kept of earlier tokens; `x`, of any length, continues them (incremental.py).
            mask: there is none for pairs of tokens; ConfigError.

        Raises ConfigError if seq is neither a multiple of the chunk nor short enough not to be cut.
        """
        no_mask(mask)
        if cache is not None:
            return self.out(self.continued(x, present, cache).reshape(*x.shape[:2], -1))
        present = checked_present(present, x)
        x = as_matmul_input(x)
        together = self.implementation != "explicit" and self.positions is None
        packed = as_one(x, self.projections, self.heads) if together else None
        heads = self.projected(x, 0) if packed is None else packed.unbind(2)
        return self.out(self.attended(*heads, present, packed).reshape(*x.shape[:2], -1))

    def projected(self, x: torch.Tensor, start: int) -> Sequence[torch.Tensor]:
        """Heads `[batch, seq, heads, head_size]` of each projection of `x`, whose first token has the position `start`: all but
        the values are turned by rotary positions, if there are any."""
        found = [split(layer(x), self.heads) for layer in self.projections]
        if self.positions is None:
            return found
        turns = self.positions.rows(found[0], start)
        return [*(rotate(one, *turns) for one in found[:-1]), found[-1]]

    def terms(self, present: Optional[torch.Tensor], score_mult: float) -> Terms:
        """Those of a call now."""
        dropout_p = self.attention_dropout if self.training else 0.0
        return Terms(self.chunk, self.before, self.after, self.causal, present, score_mult, dropout_p)


def checked_shape(width: int, heads: int, head_size: Optional[int], chunk: int, before: int, after: int, key: str) -> int:
    """The head size; ConfigError where it cannot be chosen or the chunks (under `key`) make no sense."""
    if heads < 1 or (head_size is None and width % heads):
        raise ConfigError(
            f"heads must divide the width, which is {width}",
            key="model.heads",
            value=heads,
            suggestion="or give `model.head_size`",
        )
    if head_size is not None and head_size < 1:
        raise ConfigError("a head has at least one feature", key="model.head_size", value=head_size)
    for name, value, least in (("chunk", chunk, 1), ("before", before, 0), ("after", after, 0)):
        if value < least:
            raise ConfigError(f"it is at least {least}", key=f"{key}.{name}", value=value)
    return width // heads if head_size is None else head_size


def checked_implementation(implementation: str) -> str:
    """Itself; ConfigError if it is not known."""
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(f"it is one of {', '.join(IMPLEMENTATIONS)}", key="model.attention", value=implementation)
    return implementation


def checked_present(present: Optional[torch.Tensor], x: torch.Tensor) -> Optional[torch.Tensor]:
    """`present` as bool `[batch, seq]`; ConfigError if it is something else."""
    if present is None:
        return None
    if present.dim() != 2 or present.shape != x.shape[:2] or present.dtype.is_floating_point:
        raise ConfigError(
            f"`present` says for each of the {x.shape[1]} tokens of each sequence whether it is there: bool [batch, seq]",
            value=f"{present.dtype} {list(present.shape)}",
            suggestion="queries, keys and values all come from `x`: local and LSH attention cannot attend to another sequence",
        )
    return present if present.dtype == torch.bool else present != 0


def no_mask(mask: Optional[torch.Tensor]) -> None:
    """ConfigError if there is one."""
    if mask is not None:
        raise ConfigError(
            "local and LSH attention have no mask for pairs of tokens, because most pairs are never formed",
            suggestion="say in `present` which tokens are there, or use full attention",
        )


def split(x: torch.Tensor, heads: int) -> torch.Tensor:
    """`[batch, seq, features] -> [batch, seq, heads, features / heads]`."""
    return x.view(x.shape[0], x.shape[1], heads, x.shape[2] // heads)


def as_one(x: torch.Tensor, layers: Sequence[nn.Module], heads: int) -> Optional[torch.Tensor]:
    """Several projections of `x` `[batch, seq, width]` by one matrix product: `[batch, seq, layers, heads, head_size]`.

    None where somebody watches one of them or has replaced it, so that they must be called, and on other devices than CPU.
    """
    if x.device.type != "cpu" or not all(untouched(layer) for layer in layers):
        return None
    linears = [layer.linear for layer in layers]
    bias = None if linears[0].bias is None else torch.cat([linear.bias for linear in linears])
    found = F.linear(x, torch.cat([linear.weight for linear in linears]), bias)
    return found.view(x.shape[0], x.shape[1], len(linears), heads, -1)
