"""Small branches and the comparison that every gradient test uses."""
from __future__ import annotations

import math
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ipu_lean.reversible import Pieces, ResidualBlock, ResidualStack, ReversibleBlock, ReversibleStack, divided, remember

WIDTH, SEQ, BATCH = 16, 6, 2
INNER = 12 * WIDTH


class Attention(nn.Module):
    """Causal attention with two heads, written out; no key bias, because its true gradient is zero."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout
        self.calls = 0

    def forward(self, x: Tensor, mask: Optional[Tensor] = None) -> Tensor:
        self.calls += 1
        batch, seq, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, seq, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH // 2)
        scores = scores + torch.full((seq, seq), -1e4, dtype=scores.dtype).triu(1)
        if mask is not None:
            scores = scores + mask
        weights = F.dropout(scores.softmax(-1), self.dropout, self.training)
        return F.dropout(self.out((weights @ v).transpose(1, 2).reshape(x.shape)), self.dropout, self.training)


class FeedForward(nn.Module):
    """Two linear layers and a GELU; `gain` [seq, 1] multiplies the output if given."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)
        self.dropout = dropout
        self.calls = 0

    def forward(self, x: Tensor, gain: Optional[Tensor] = None) -> Tensor:
        self.calls += 1
        h = F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout, self.training)
        return h if gain is None else h * gain


class Wide(nn.Module):
    """A feed-forward with a wide middle, its rows in `pieces` pieces, or (`sums`) its middle cut into that many."""

    def __init__(self, pieces=1, sums=False, dropout=0.0, after=False, decide=False):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.last = nn.LayerNorm(WIDTH) if after else None
        self.pieces, self.sums, self.dropout, self.decide = pieces, sums, dropout, decide
        self.runs = 0

    def forward(self, x, gain=None):
        if self.pieces == 1:
            out = self.middle(self.norm(x), slice(0, INNER), True)
            out = out if gain is None else out * gain
        else:
            groups = [0] * self.pieces if self.sums else range(self.pieces)
            out = divided(Pieces(self.begin, self.piece, groups), x, (self,), gain=gain)
        return out if self.last is None else self.last(out)

    def middle(self, n, part, first):
        self.runs += 1
        h = F.gelu(F.linear(n, self.up.weight[part], self.up.bias[part]))
        if self.decide:
            h = h * remember(lambda: (h.mean() > 0).to(h.dtype) + 1.0)
        h = F.dropout(h, self.dropout, self.training)
        return F.linear(h, self.down.weight[:, part], self.down.bias if first else None)

    def begin(self, x):
        if self.sums:
            return [(self.norm(x),)] * self.pieces
        return [(rows,) for rows in x.reshape(-1, WIDTH).split(-(-x.shape[0] * x.shape[1] // self.pieces))]

    def piece(self, number, x, gain=None):
        if self.sums:
            step = INNER // self.pieces
            out = self.middle(x, slice(number * step, (number + 1) * step), number == 0)
        else:
            out = self.middle(self.norm(x), slice(0, INNER), True)
        return out if gain is None else out * gain


def reversible(
    engine: str,
    layers: int = 3,
    dropout: float = 0.0,
    order: str = "attn-ffn",
    visits: Optional[List[int]] = None,
    dtype: torch.dtype = torch.float64,
    make: Optional[Callable[[], nn.Module]] = None,
    coupling: str = "additive",
    **options: Any,
) -> ReversibleStack:
    """A stack with the same weights whatever the engine; `visits` is the execution order of its blocks."""
    torch.manual_seed(0)
    if order == "aaff":
        blocks = [
            ReversibleBlock([Attention(dropout), Attention(dropout), FeedForward(dropout), FeedForward(dropout)], coupling)
            for _ in range(layers // 2)
        ]
    else:
        second = make or (lambda: FeedForward(dropout))
        blocks = [ReversibleBlock([Attention(dropout), second()], coupling) for _ in range(layers)]
    order_of_blocks = blocks if visits is None else [blocks[i] for i in visits]
    return ReversibleStack(order_of_blocks, engine=engine, **options).to(dtype)


def residual(
    engine: str, layers: int = 3, dropout: float = 0.0, dtype: torch.dtype = torch.float64, **options: Any
) -> ResidualStack:
    """A residual stack with the same weights whatever the engine."""
    torch.manual_seed(0)
    blocks = [ResidualBlock([Attention(dropout), FeedForward(dropout)]) for _ in range(layers)]
    return ResidualStack(blocks, engine=engine, **options).to(dtype)


def data(dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(BATCH, SEQ, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def loss_of(y: Tensor, seed: int = 3) -> Tensor:
    """A loss whose gradient is not symmetric in anything: a random linear form plus the mean square."""
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(y.dtype)
    return (weights * y).mean() + y.pow(2).mean()


def gradients(
    stack: nn.Module, x: Optional[Tensor] = None, autocast: Optional[torch.dtype] = None, **kwargs: Any
) -> Dict[str, Tensor]:
    """Gradients of one step by name, `x` included if it needs one; the random state at the forward pass is always the same."""
    dtype = next(stack.parameters()).dtype
    x = data(dtype).requires_grad_() if x is None else x
    torch.manual_seed(7)
    with torch.autocast("cpu", enabled=autocast is not None, dtype=autocast or torch.bfloat16):
        y = stack(x, **kwargs)
    loss_of(y.to(dtype)).backward()
    return collect(stack, x=x)


def collect(stack: nn.Module, **extra: Tensor) -> Dict[str, Tensor]:
    """`.grad` of every parameter and of the named tensors that have one."""
    named: List[Tuple[str, Tensor]] = list(stack.named_parameters()) + list(extra.items())
    return {name: t.grad.clone() for name, t in named if t.grad is not None}


def error(reference: Tensor, other: Tensor) -> float:
    """|u - v| / |u|."""
    return ((reference - other).norm() / reference.norm()).item()


def assert_same(reference: Dict[str, Tensor], other: Dict[str, Tensor], tolerance: float) -> None:
    """The same names, every reference gradient non-zero, and the relative error of each within `tolerance`."""
    assert reference and set(reference) == set(other)
    for name, gradient in reference.items():
        assert gradient.norm() > 0, f"{name}: a zero reference proves nothing"
        found = error(gradient, other[name])
        assert found <= tolerance, f"{name}: relative error {found:.1e} > {tolerance:.0e}"
