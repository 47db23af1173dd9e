"""Couplings: how the two streams of a stack take in what a branch computed, and how that is undone.

A coupling is four pure functions of tensors. With (a, b) the streams before half-step number `step` (0, 1, 2, … over the whole
stack, repeats of shared blocks counted), f the branch, and (a', b') the streams after it:

    z = read(a, b, step)           what the branch reads             z = read_back(a', b', step)             the same, from behind
    a', b' = forward(a, b, f(z), step)                               a, b = inverse(a', b', f(z), step)

The rest of the room (streams, engine, stack) knows no more about it. Streams are [batch, seq, width].
"""
from __future__ import annotations

from typing import Dict, Optional, Tuple, Type

import torch
from torch import Tensor

from ipu_lean.errors import ConfigError, did_you_mean

Pair = Tuple[Tensor, Tensor]


class Coupling:
    """What all couplings share; on its own it is no coupling.

    Attributes:
        name: the value of `model.stack.coupling`.
        linear: `forward` is linear in the streams and in fx, so that autograd saves no tensor for it.
        widening: features of a branch's output over those of its input.
        reads_second: the first branch reads the second stream, not the first one.
    """

    name = ""
    linear = True
    widening = 1
    reads_second = True

    def admit(self, x0: Tensor) -> Tensor:
        """The stack's input as the streams may hold it."""
        return x0

    def read(self, a: Tensor, b: Tensor, step: int) -> Tensor:
        """What the branch of this half-step reads; the couplings that swap read the stream that they do not write."""
        return b

    def read_back(self, a: Tensor, b: Tensor, step: int) -> Tensor:
        """The same from the streams after the half-step."""
        return a

    def forward(self, a: Tensor, b: Tensor, fx: Tensor, step: int) -> Pair:
        """The streams after the half-step."""
        return b, self.write(a, fx, step)

    def inverse(self, a: Tensor, b: Tensor, fx: Tensor, step: int) -> Pair:
        """The streams before the half-step, from those after it."""
        return self.unwrite(b, fx, step), a

    def write(self, x: Tensor, fx: Tensor, step: int) -> Tensor:
        """The stream that takes fx in, afterwards."""
        raise NotImplementedError

    def unwrite(self, y: Tensor, fx: Tensor, step: int) -> Tensor:
        """The x that `write` took, from its result and the same fx."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return self.name


class Additive(Coupling):
    """(a, b) -> (b, a + f(b)): NICE (Dinh et al. 2014), RevNet (Gomez et al. 2017) and Reformer (Kitaev et al. 2020).

    Volume-preserving; in floating point the inverse is off by one rounding of the sum, whatever the depth of the stack.
    """

    name = "additive"

    def write(self, x: Tensor, fx: Tensor, step: int) -> Tensor:
        return x + fx

    def unwrite(self, y: Tensor, fx: Tensor, step: int) -> Tensor:
        return y - fx


class Mean(Coupling):
    """(a, b) -> (b, (i a + f(b)) / (i + 1)): each stream is the mean of its input and of the branch outputs that it received.

    i is what the stream has received so far, its input included (`index: stream`), or the number of the half-step from 1
    (`index: global`), which is no mean of anything but a decaying average. With `stream`, i times the stream is the sum that the
    additive coupling would hold; branches that begin with a norm do not see the difference.
    """

    name = "mean"

    def __init__(self, index: str = "stream") -> None:
        if index not in ("stream", "global"):
            raise ConfigError("counts per `stream` or `global`ly", key="model.stack.index", value=index)
        self.index = index

    def count(self, step: int) -> int:
        """i at this half-step."""
        return (step // 2 if self.index == "stream" else step) + 1

    def write(self, x: Tensor, fx: Tensor, step: int) -> Tensor:
        i = self.count(step)
        return (x * float(i) + fx) * (1.0 / (i + 1))

    def unwrite(self, y: Tensor, fx: Tensor, step: int) -> Tensor:
        i = self.count(step)
        return (y * float(i + 1) - fx) * (1.0 / i)


class Affine(Coupling):
    """(a, b) -> (b, sigmoid(s + 2) a + t) with [s, t] = f(b): Real NVP (Dinh et al. 2017), in memcnn's form with a bounded scale.

    The branch gives twice its width, s first. Undoing it divides by sigmoid(s + 2), which is 0.88 where s is zero.
    """

    name = "affine"
    linear = False
    widening = 2

    def write(self, x: Tensor, fx: Tensor, step: int) -> Tensor:
        scale, shift = fx.chunk(2, -1)
        return torch.sigmoid(scale + 2.0) * x + shift

    def unwrite(self, y: Tensor, fx: Tensor, step: int) -> Tensor:
        scale, shift = fx.chunk(2, -1)
        return (y - shift) / torch.sigmoid(scale + 2.0)


class _Decaying(Coupling):
    """A coupling with a decay, beta."""

    def __init__(self, beta: float = 0.9) -> None:
        if not 0.0 < beta < 1.0:
            raise ConfigError(
                "lies between 0 and 1: with 0 nothing of the velocity is left to undo the step with, with 1 nothing is learned",
                key="model.stack.beta",
                value=beta,
                suggestion="use 0.9, or 0.99 for deep stacks",
            )
        self.beta = beta

    def __repr__(self) -> str:
        return f"{self.name} beta={self.beta}"


class Momentum(_Decaying):
    """(x, v) -> (x + v', v') with v' = beta v + (1 - beta) f(x): the momentum network of Sander et al. 2021 (arXiv 2102.07870).

    Undoing it divides v by beta, so errors grow by 1 / beta a half-step, and gradients shrink in the same measure.
    """

    name = "momentum"
    reads_second = False

    def read(self, a: Tensor, b: Tensor, step: int) -> Tensor:
        return a

    def read_back(self, a: Tensor, b: Tensor, step: int) -> Tensor:
        return a - b

    def forward(self, a: Tensor, b: Tensor, fx: Tensor, step: int) -> Pair:
        v = self.write(b, fx, step)
        return a + v, v

    def inverse(self, a: Tensor, b: Tensor, fx: Tensor, step: int) -> Pair:
        return a - b, self.unwrite(b, fx, step)

    def write(self, x: Tensor, fx: Tensor, step: int) -> Tensor:
        return x * self.beta + fx * (1.0 - self.beta)

    def unwrite(self, y: Tensor, fx: Tensor, step: int) -> Tensor:
        return (y - fx * (1.0 - self.beta)) * (1.0 / self.beta)


class ModifiedMomentum(_Decaying):
    """(A, B) -> (A', B + (1 - beta) beta^-(i+1) A') with A' = A + f(beta^i B), i the half-step: revlib's `momentum_net`.

    The momentum network in other coordinates: beta^i B is its x, and A = x + beta / (1 - beta) v. Each half-step only adds, but B
    grows as beta^-i, and so does what is lost to rounding in it.
    """

    name = "modified-momentum"

    def read(self, a: Tensor, b: Tensor, step: int) -> Tensor:
        return b * self.beta**step

    def read_back(self, a: Tensor, b: Tensor, step: int) -> Tensor:
        return self._undrift(a, b, step) * self.beta**step

    def forward(self, a: Tensor, b: Tensor, fx: Tensor, step: int) -> Pair:
        a = self.write(a, fx, step)
        return a, b + a * self._drift(step)

    def inverse(self, a: Tensor, b: Tensor, fx: Tensor, step: int) -> Pair:
        return self.unwrite(a, fx, step), self._undrift(a, b, step)

    def write(self, x: Tensor, fx: Tensor, step: int) -> Tensor:
        return x + fx

    def unwrite(self, y: Tensor, fx: Tensor, step: int) -> Tensor:
        return y - fx

    def _drift(self, step: int) -> float:
        return (1.0 - self.beta) * self.beta ** -(step + 1)

    def _undrift(self, a: Tensor, b: Tensor, step: int) -> Tensor:
        return b - a * self._drift(step)


COUPLINGS: Dict[str, Type[Coupling]] = {kind.name: kind for kind in (Additive, Momentum, ModifiedMomentum, Mean, Affine)}
DECAYING = tuple(name for name, kind in COUPLINGS.items() if issubclass(kind, _Decaying))


def make_coupling(
    name: str, beta: Optional[float] = None, index: str = "stream", exact_bits: Optional[int] = None
) -> Coupling:
    """The coupling called `name`.

    Args:
        beta: the decay of those that have one; 0.9 unless given.
        index: what `mean` counts, `stream` or `global`.
        exact_bits: streams on a grid of 2^-exact_bits, so that inverting is exact (exact.py); additive only.
    Raises:
        ConfigError: there is no such coupling, or it has no beta (no index, no exact form).
    """
    if name not in COUPLINGS:
        near = did_you_mean(name, COUPLINGS)
        raise ConfigError(
            f"the coupling is one of: {', '.join(COUPLINGS)}",
            key="model.stack.coupling",
            value=name,
            suggestion=f"did you mean `{near}`?" if near else None,
        )
    if beta is not None and name not in DECAYING:
        raise ConfigError(f"the {name} coupling has no beta", key="model.stack.beta", value=beta, suggestion="remove it")
    if index != "stream" and name != "mean":
        raise ConfigError(f"the {name} coupling counts nothing", key="model.stack.index", value=index, suggestion="remove it")
    if exact_bits is not None:
        from .exact import ExactAdditive

        if name != "additive":
            raise ConfigError(
                f"sums on a grid are exact, products are not, and the {name} coupling multiplies",
                key="model.stack.exact",
                value=True,
                suggestion="use `coupling: additive`, or remove it",
            )
        return ExactAdditive(exact_bits)
    if name in DECAYING:
        return COUPLINGS[name](0.9 if beta is None else beta)  # type: ignore[call-arg]
    return COUPLINGS[name](index) if name == "mean" else COUPLINGS[name]()  # type: ignore[call-arg]
