"""Discrete decisions of a module (hash buckets, a route) as tensors of a graph: made by one evaluation, given to the next.

`remember` (frames.py) keeps them with the engine's record of a call. A derived backward pass has no such record: its second
evaluation is another graph, which takes what the first one decided as inputs.
"""

from __future__ import annotations

from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from torch import Tensor
from torch.utils import _pytree as pytree

from .frames import Entered


class Decision(NamedTuple):
    """One result of `remember`: its tensors, and what is around them (a container, counts).

    Attributes:
        leaves: everything that is no tensor, the class `Tensor` in the place of each tensor.
        spec: how the leaves make up the result.
    """

    tensors: Tuple[Tensor, ...]
    leaves: Tuple[Any, ...]
    spec: Any

    @classmethod
    def of(cls, result: Any) -> Decision:
        """From what `remember` would return."""
        leaves, spec = pytree.tree_flatten(result)
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        return cls(tensors, tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves), spec)

    def with_tensors(self, tensors: Iterator[Tensor]) -> Any:
        """The result that holds the next of these tensors."""
        return pytree.tree_unflatten([next(tensors) if leaf is Tensor else leaf for leaf in self.leaves], self.spec)


class Deciding:
    """Around a run of a function: its decisions are collected in `found`, or, with `known`, are those.

    Args:
        known: what an earlier run found. tensors: theirs, in order, in the place of the ones that were found.
    """

    def __init__(self, known: Sequence[Decision] = (), tensors: Optional[Sequence[Tensor]] = None) -> None:
        self.decisions: List[Any] = []
        self.divisions: List[Any] = []
        self.replaying = tensors is not None
        given = iter(tensors or ())
        results = [decision.with_tensors(given) for decision in known] if self.replaying else []
        self.replayed_decisions: Iterator[Any] = iter(results)
        self.replayed_divisions: Iterator[Any] = iter(())
        self._entered: Any = None

    @property
    def found(self) -> List[Decision]:
        """In the order in which they were made."""
        return [Decision.of(result) for result in self.decisions]

    def __enter__(self) -> Deciding:
        self._entered = Entered(self, self.replaying)
        self._entered.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)
