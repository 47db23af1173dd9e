"""Interface of the recomputing engine; for now every engine keeps what plain autograd keeps (same numbers and gradients)."""
from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence, Tuple, TypeVar

from torch import Tensor, is_grad_enabled, nn

T = TypeVar("T")


def recording_needed() -> bool:
    """Whether this call's activations may be asked for by a backward pass."""
    return is_grad_enabled()


def recomputing() -> bool:
    """True while the engine runs a branch for the second time."""
    return False


def remember(compute: Callable[[], T]) -> T:
    """A discrete decision (bucket, permutation, route): computed in the first run of a branch, returned again in its second."""
    return compute()


def without_dynamo(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, never traced by torch.compile."""
    return function


class Chain:
    """One call of a stack."""

    def half_step(self, branch: nn.Module, coupling: Any, a: Tensor, b: Tensor, kwargs: Dict[str, Any]) -> Tuple[Tensor, Tensor]:
        """(a, b) -> (b, a + f(b))."""
        return b, coupling.forward(a, branch(b, **kwargs))

    def finish(self, a: Tensor, b: Tensor) -> Tuple[Tensor, Tensor]:
        """The streams at the end of the call."""
        return a, b


def run_segments(parts: Sequence[List[nn.Module]], state: Tuple[Tensor, ...], kwargs: Dict[str, Any]) -> Tuple[Tensor, ...]:
    """The blocks of all parts in a row, from state to state."""
    for part in parts:
        for block in part:
            out = block(*state, **kwargs)
            state = out if isinstance(out, tuple) else (out,)
    return state
