"""How one tensor becomes the two streams of a reversible stack, and how the two become one again.

Written by formula, because words for streams differ from paper to paper. `x0` is the stack's input, `x` the stream that entered
as the first of the pair, `y` the other one; for [attention, FFN] blocks x is the one that attention writes.
"""
from __future__ import annotations

from typing import Callable, Dict, Tuple

from torch import Tensor

from ipu_lean.errors import ConfigError, did_you_mean

INPUTS: Dict[str, Callable[[Tensor], Tuple[Tensor, Tensor]]] = {
    "duplicate": lambda x0: (x0, x0),
}
OUTPUTS: Dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "x": lambda x, y, x0: x,
    "y": lambda x, y, x0: y,
    "sum": lambda x, y, x0: x + y,
    "sum-minus-input": lambda x, y, x0: x + y - x0,
    "mean": lambda x, y, x0: (x + y) * 0.5,
}


def check_choice(kind: str, known: Dict[str, Callable], key: str) -> str:
    """`kind` itself, or a ConfigError that lists what is known."""
    if kind not in known:
        near = did_you_mean(kind, known)
        raise ConfigError(
            f"must be one of: {', '.join(known)}",
            key=key,
            value=kind,
            suggestion=f"did you mean `{near}`?" if near else None,
        )
    return kind


def enter(x0: Tensor, kind: str) -> Tuple[Tensor, Tensor]:
    """[batch, seq, width] -> the two streams that go into the first half-step.

    `duplicate`: (x0, x0), the same tensor twice (revlib, Reformer); no copy is made.
    """
    return INPUTS[check_choice(kind, INPUTS, "model.stack.input")](x0)


def leave(x: Tensor, y: Tensor, x0: Tensor, kind: str) -> Tensor:
    """The two streams at the end, and the stack's input -> [batch, seq, width].

    With `duplicate` and the additive coupling, and S the sum of all branch outputs: `sum` = 2 x0 + S; `sum-minus-input` = x0 + S,
    the form of a residual stack (each branch reads one stream only, though); `mean` = x0 + S/2; `x` and `y` = x0 + the outputs of
    the branches that wrote that stream. With `x` the last branch of the stack is unused and its parameters get no gradient.
    """
    return OUTPUTS[check_choice(kind, OUTPUTS, "model.stack.output")](x, y, x0)
