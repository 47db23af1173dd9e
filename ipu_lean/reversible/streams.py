"""How one tensor becomes the two streams of a reversible stack, and how the two become one again.

Written by formula, because words for streams differ from paper to paper. `x0` is the stack's input, `x` the stream that entered
as the first of the pair, `y` the other one. With a coupling that swaps and [attention, FFN] blocks, x is the one that attention
writes; with `momentum`, x is the position and y the velocity; with `modified-momentum`, x is A and y is B.
"""
from __future__ import annotations

from typing import Callable, Dict, Iterable, Optional, Tuple

import torch
from torch import Tensor, nn

from ipu_lean.errors import ConfigError, did_you_mean

Pair = Tuple[Tensor, Tensor]


def _halves(x0: Tensor) -> Pair:
    if x0.shape[-1] % 2:
        raise ConfigError("two halves need an even width", key="model.stack.input", value="split")
    x, y = x0.chunk(2, -1)
    return x, y


INPUTS: Dict[str, Callable[[Tensor], Pair]] = {
    "duplicate": lambda x0: (x0, x0),
    "zeros": lambda x0: (torch.zeros_like(x0), x0),
    "zeros-read": lambda x0: (x0, torch.zeros_like(x0)),
    "split": _halves,
}
OUTPUTS: Dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "x": lambda x, y, x0: x,
    "y": lambda x, y, x0: y,
    "sum": lambda x, y, x0: x + y,
    "sum-minus-input": lambda x, y, x0: x + y - x0,
    "mean": lambda x, y, x0: (x + y) * 0.5,
    "concat": lambda x, y, x0: torch.cat((x, y), -1),
}
GATES = ("gate", "gate-channels")


class Gate(nn.Module):
    """g x + (1 - g) y with g = sigmoid(weight), learned: one g for all features or one for each. It starts at 1/2.

    Args:
        features: 1, or the width of a stream.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features))

    @property
    def init_stds(self) -> Dict[str, float]:
        """Standard deviation of each parameter at initialisation, by name."""
        return {"weight": 0.0}

    def reset_parameters(self) -> None:
        """Back to the mean of the two streams."""
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """[batch, seq, width] twice -> [batch, seq, width]."""
        return y + torch.sigmoid(self.weight) * (x - y)


def check_choice(kind: str, known: Iterable[str], key: str) -> str:
    """`kind` itself, or a ConfigError that lists what is known."""
    known = tuple(known)
    if kind not in known:
        near = did_you_mean(kind, known)
        raise ConfigError(
            f"must be one of: {', '.join(known)}",
            key=key,
            value=kind,
            suggestion=f"did you mean `{near}`?" if near else None,
        )
    return kind


def enter(x0: Tensor, kind: str, reads_second: bool = True) -> Pair:
    """[batch, seq, width] -> the two streams that go into the first half-step.

    `duplicate`: (x0, x0), the same tensor twice (revlib, Reformer); no copy is made. `zeros`: x0 for the stream that the first
    branch reads, zeros for the other: (0, x0), or (x0, 0) for a coupling that reads the first stream (momentum: no velocity).
    `zeros-read`: the other way round, so that the first branch reads zeros, which a norm magnifies by 1 / sqrt(eps). `split`: the
    two halves of the features, [batch, seq, width / 2] each.
    """
    pair = INPUTS[check_choice(kind, INPUTS, "model.stack.input")](x0)
    return pair[::-1] if kind.startswith("zeros") and not reads_second else pair


def left_behind(a: Tensor, b: Tensor, kind: str, reads_second: bool = True) -> Tensor:
    """The x0 that `enter` made the pair of."""
    if kind == "split":
        return torch.cat((a, b), -1)
    return b if (kind != "zeros-read") == reads_second else a


def check_pair(coupling: str, input: str, output: str) -> None:
    """ConfigError for a result that would mean nothing: only additive streams still hold what they began with."""
    if output == "sum-minus-input" and (coupling != "additive" or input != "duplicate"):
        why = f"with input {input} it is not in the sum twice" if coupling == "additive" else f"a {coupling} stream rescales it"
        raise ConfigError(
            f"takes away the input that both additive streams began with; {why}",
            key="model.stack.output",
            value=output,
            suggestion="use `sum`, `mean`, `x` or `y`",
        )


def make_gate(output: str, width: Optional[int]) -> Optional[Gate]:
    """The gate of outputs that have one; `width` is that of a stream."""
    if output not in GATES:
        return None
    if output == "gate-channels" and width is None:
        raise ConfigError("a gate for each feature needs the width of a stream", key="model.stack.output", value=output)
    return Gate(1 if output == "gate" or width is None else width)


def leave(x: Tensor, y: Tensor, x0: Tensor, kind: str, gate: Optional[nn.Module] = None) -> Tensor:
    """The two streams at the end, and the stack's input -> [batch, seq, width], or twice that for `concat`.

    With `duplicate` and the additive coupling, and S the sum of all branch outputs: `sum` = 2 x0 + S; `sum-minus-input` = x0 + S,
    the form of a residual stack (each branch reads one stream only, though); `mean` = x0 + S/2; `x` and `y` = x0 + the outputs of
    the branches that wrote that stream. With `x` the last branch of the stack is unused and its parameters get no gradient,
    unless the coupling passes it on (momentum). `gate` and `gate-channels` learn g x + (1 - g) y.
    """
    check_choice(kind, (*OUTPUTS, *GATES), "model.stack.output")
    if kind in GATES:
        if gate is None:
            raise ConfigError("a learned output needs its gate", key="model.stack.output", value=kind)
        return gate(x, y)
    return OUTPUTS[kind](x, y, x0)
