"""How far rounding carries when a reversible stack is undone: a prediction from the stack's description alone. Needs no torch.

With all branch outputs known, a half-step is linear in the two streams: s' = M s + g f, and undoing it is s = M^-1 (s' - g f).
What goes wrong on the way back is

- a rounding of each stream that is written, forward and backward, of the size of the stream;
- the branch's answer to an input that is off: a branch that begins with a norm answers relative changes of what it reads, so with
  z off by e the output is off by |f| e / |z|;
- in 16-bit branches, that an input which is off in its last float32 bit now and then rounds to another 16-bit number.

All three are taken as independent and followed as second moments (2 x 2 covariances), which is exact for the linear part. Sizes
of the streams come from the same recurrence run forward, with branch outputs of one given size that are independent of each
other. The relative error (rms) of what the branches read is also that of a gradient; the worst tensor of a model is some four
times worse (`python benchmarks/reversible.py --only conditioning` prints measured beside predicted).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import List, NamedTuple, Optional, Sequence, Tuple

Matrix = Tuple[Tuple[float, float], Tuple[float, float]]
Vector = Tuple[float, float]

SINGLE, BFLOAT16, FLOAT16 = 2.0**-24, 2.0**-8, 2.0**-11  # unit roundoff: half a unit in the last place, relative
KEPT = 0.88079708  # sigmoid(2): what the affine coupling keeps of a stream while its scale is zero
_ROUNDING = 0.41  # rms of a rounding error over its bound: 1 / sqrt(3), and the mean over the significand
_WORST = 4.0
_HUGE = 1e150


class HalfStep(NamedTuple):
    """s' = M s + g f, where the branch reads r . s, which is q . s' from behind."""

    m: Matrix
    g: Vector
    r: Vector
    q: Vector


@dataclass(frozen=True)
class Stack:
    """What is undone.

    Attributes:
        coupling, beta, index, input: as in `model.stack`, `auto` resolved.
        half_steps: branches in a row.
        branch: size (rms) of a branch's output over that of the stack's input.
        norm_eps: of the norm that a branch begins with; it bounds what a branch that reads zeros can answer.
    """

    coupling: str
    half_steps: int
    beta: Optional[float] = None
    index: str = "stream"
    input: str = "duplicate"
    branch: float = 1.0
    norm_eps: float = 1e-5


def half_step(stack: Stack, i: int) -> HalfStep:
    """Half-step number i (from 0) as a linear map."""
    beta = stack.beta or 0.0
    if stack.coupling == "momentum":  # s = (x, v)
        return HalfStep(((1.0, beta), (0.0, beta)), (1 - beta, 1 - beta), (1.0, 0.0), (1.0, -1.0))
    if stack.coupling == "modified-momentum":  # s = (A, X) with X = beta^i B, in which all sizes are moderate
        mix = 1 - beta
        return HalfStep(((1.0, 0.0), (mix, beta)), (1.0, mix), (0.0, 1.0), (-mix / beta, 1 / beta))
    keep, gain = 1.0, 1.0
    if stack.coupling == "mean":
        count = (i // 2 if stack.index == "stream" else i) + 1
        keep, gain = count / (count + 1), 1 / (count + 1)
    if stack.coupling == "affine":
        keep = KEPT
    return HalfStep(((0.0, 1.0), (keep, 0.0)), (0.0, gain), (0.0, 1.0), (1.0, 0.0))


def amplification(stack: Stack) -> float:
    """The largest factor by which undoing the whole stack can magnify a relative error of a stream, branches left out.

    momentum: beta^-n for n half-steps; affine: 0.88^-(n / 2); mean: 1 + n / 2, or about sqrt(n) with the global index; additive:
    1.
    """
    n = stack.half_steps
    if stack.coupling in ("momentum", "modified-momentum"):
        return _power(1 / (stack.beta or 1.0), n)
    if stack.coupling == "affine":
        return _power(1 / KEPT, n / 2)
    if stack.coupling == "mean":
        keeps = [half_step(stack, i).m[1][0] for i in range(n)]
        return max(math.prod(1 / keep for keep in keeps[side::2]) for side in (0, 1)) if n > 1 else 1 / keeps[0]
    return 1.0


def gradient_error(stack: Stack, half: Optional[float] = None, unit: float = SINGLE) -> float:
    """Predicted relative error of the worst gradient when the backward pass inverts the stack. Infinite where it overflows.

    Args:
        half: unit roundoff of the 16-bit format that branches compute in; None: that of the streams.
        unit: unit roundoff of the streams.
    """
    noise = 0.0 if half is None else _ROUNDING * half
    sizes = _sizes(stack)
    if len(sizes) < 3:
        return 0.0
    error: Matrix = ((0.0, 0.0), (0.0, 0.0))
    worst = 0.0
    for i in reversed(range(stack.half_steps - 1)):  # the streams before the last half-step are kept
        step = half_step(stack, i)
        before, after = sizes[i], sizes[i + 1]
        error = _plus(error, _rounding(after, stack, i + 1, unit))
        read = math.sqrt(max(_along(error, step.q), 0.0))
        size = math.sqrt(max(_along(before, step.r), 0.0))
        relative = read / math.sqrt(size * size + stack.norm_eps)
        if i > 0:  # what the first branch reads is kept
            worst = max(worst, relative)
        answer = stack.branch * relative
        if noise:
            answer = math.hypot(answer, stack.branch * noise * math.sqrt(min(1.0, relative / noise)))
        error = _plus(error, _outer(step.g, answer))
        error = _plus(_through(_inverse(step.m), error), _rounding(before, stack, i, unit))
        if not error[0][0] + error[1][1] < _HUGE:
            return math.inf
    return _WORST * worst


def tolerance(stack: Stack, half: Optional[float] = None, unit: float = SINGLE) -> float:
    """The largest `gradient_error` that is no reason to refuse: 1e-3, or what 16 bits cost anyway.

    That is two roundings of the 16-bit format, or twice the error of an additive stack of the same depth, whichever is more.
    """
    coarse = half if half is not None else unit
    if coarse == SINGLE:
        return 1e-3
    additive = replace(stack, coupling="additive", beta=None, index="stream")
    return max(1e-3, 2 * coarse, 2 * gradient_error(additive, half, unit))


def _power(base: float, exponent: float) -> float:
    return math.exp(min(exponent * math.log(base), 600.0))


def _sizes(stack: Stack) -> List[Matrix]:
    """Covariance of the streams before each half-step, and after the last; the stack's input has size 1."""
    zero, one = ((0.0, 0.0), (0.0, 0.0)), ((1.0, 1.0), (1.0, 1.0))
    first = stack.coupling == "momentum"  # the stream that the first branch reads
    if stack.input.startswith("zeros"):
        of_first = first == (stack.input == "zeros")
        zero = ((1.0, 0.0), (0.0, 0.0)) if of_first else ((0.0, 0.0), (0.0, 1.0))
    size = {"duplicate": one, "split": ((1.0, 0.0), (0.0, 1.0))}.get(stack.input, zero)
    found = [size]
    for i in range(stack.half_steps):
        step = half_step(stack, i)
        size = _plus(_through(step.m, size), _outer(step.g, stack.branch))
        found.append(size)
    return found


def _rounding(size: Matrix, stack: Stack, i: int, unit: float) -> Matrix:
    """Of both streams (that which is only passed on is rounded no more, but was when it was written)."""
    unit = _ROUNDING * unit
    if stack.coupling in ("additive", "mean", "affine"):
        return ((0.0, 0.0), (0.0, unit * unit * size[1][1])) if i else ((unit * unit * size[0][0], 0.0), (0.0, 0.0))
    return ((unit * unit * size[0][0], 0.0), (0.0, unit * unit * size[1][1]))


def _plus(a: Matrix, b: Matrix) -> Matrix:
    return ((a[0][0] + b[0][0], a[0][1] + b[0][1]), (a[1][0] + b[1][0], a[1][1] + b[1][1]))


def _outer(g: Vector, size: float) -> Matrix:
    return ((g[0] * g[0] * size * size, g[0] * g[1] * size * size), (g[0] * g[1] * size * size, g[1] * g[1] * size * size))


def _along(matrix: Matrix, v: Sequence[float]) -> float:
    return v[0] * v[0] * matrix[0][0] + 2 * v[0] * v[1] * matrix[0][1] + v[1] * v[1] * matrix[1][1]


def _through(m: Matrix, matrix: Matrix) -> Matrix:
    """m matrix m^T."""
    rows = [[sum(m[i][k] * matrix[k][j] for k in (0, 1)) for j in (0, 1)] for i in (0, 1)]
    found = [[sum(rows[i][k] * m[j][k] for k in (0, 1)) for j in (0, 1)] for i in (0, 1)]
    return ((found[0][0], found[0][1]), (found[1][0], found[1][1]))


def _inverse(m: Matrix) -> Matrix:
    determinant = m[0][0] * m[1][1] - m[0][1] * m[1][0]
    return (
        (m[1][1] / determinant, -m[0][1] / determinant),
        (-m[1][0] / determinant, m[0][0] / determinant),
    )
