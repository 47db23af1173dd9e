"""A reversible stack: blocks of branches that write two streams in turn, and the choice of what its backward pass keeps."""
from __future__ import annotations

from typing import Any, Iterator, List, Optional, Sequence, Tuple

from torch import Tensor, nn

from ipu_lean.errors import ConfigError

from . import streams
from .couplings import coupling_named
from .engine import Chain, recording_needed, run_segments, without_dynamo
from .routing import check_kwargs, kwargs_for
from .visits import Visits, layers_of, segments

ENGINES = ("invert", "store", "checkpoint")


class ReversibleBlock(nn.Module):
    """Half-steps (a, b) -> (b, a + f(b)), one for each branch in order.

    A branch is any module `f(x) -> [batch, seq, width]` without a residual of its own, already scaled by its multiplier.
    [attention, FFN] is one layer of RevNet and Reformer: attention writes the first stream, the FFN the second.
    [attention 1, attention 2, FFN 1, FFN 2] is two layers in the order `aaff`: each stream receives both kinds.

    Args:
        branches: executed in this order; their number is even, so that the streams leave in the order in which they came.
        coupling: how a branch's output enters a stream (couplings.py).
    """

    def __init__(self, branches: Sequence[nn.Module], coupling: str = "additive") -> None:
        super().__init__()
        if not branches or len(branches) % 2:
            raise ConfigError("a reversible block needs an even number of branches, at least two", value=len(branches))
        self.branches = nn.ModuleList(branches)
        self.coupling = coupling_named(coupling)

    def forward(self, a: Tensor, b: Tensor, chain: Optional[Chain] = None, **kwargs: Any) -> Tuple[Tensor, Tensor]:
        """Two streams [batch, seq, width] -> the two streams after every branch.

        `chain` is the engine's record of this call and comes from the stack; without it nothing special is saved or freed.
        """
        for branch in self.branches:
            own = kwargs_for(branch, kwargs)
            if chain is None:
                a, b = b, self.coupling.forward(a, branch(b, **own))
            else:
                a, b = chain.half_step(branch, self.coupling, a, b, own)
        return a, b

    def inverse(self, a: Tensor, b: Tensor, **kwargs: Any) -> Tuple[Tensor, Tensor]:
        """The streams that `forward` took, from those that it returned. Branches must not draw random numbers (eval mode)."""
        for branch in reversed(self.branches):
            own = kwargs_for(branch, kwargs)
            a, b = self.coupling.inverse(b, branch(a, **own)), a
        return a, b


class ReversibleStack(nn.Module):
    """Blocks in a row over two streams, from one tensor to one tensor.

    Args:
        blocks: in execution order; the same object may come several times (shared layers). They are called as modules, so that
            module hooks fire.
        input, output: how the streams begin and end (streams.py).
        engine: what is kept for the backward pass. The numbers and gradients are the same.
            `invert`: nothing per layer; inputs are rebuilt from outputs and each branch runs a second time (engine.py).
            `checkpoint`: both streams at every `checkpoint_every`-th layer.
            `store`: everything, as plain autograd does.
        checkpoint_every: layers (attention and FFN pairs) between two checkpoints.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        *,
        input: str = "duplicate",
        output: str = "sum-minus-input",
        engine: str = "invert",
        checkpoint_every: int = 1,
    ) -> None:
        super().__init__()
        if engine not in ENGINES:
            raise ConfigError(f"a reversible stack runs with one of: {', '.join(ENGINES)}", key="memory.engine", value=engine)
        if checkpoint_every < 1:
            raise ConfigError("must be at least 1", key="memory.checkpoint_every", value=checkpoint_every)
        self.input = streams.check_choice(input, streams.INPUTS, "model.stack.input")
        self.output = streams.check_choice(output, streams.OUTPUTS, "model.stack.output")
        self.engine, self.checkpoint_every = engine, checkpoint_every
        self.visits = Visits(blocks)
        self.blocks = self.visits.unique()

    def executed(self) -> List[nn.Module]:
        """The blocks in execution order, with repeats."""
        return self.visits.of(self.blocks)

    def _branches(self) -> Iterator[nn.Module]:
        return (branch for block in self.blocks for branch in block.branches)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """[batch, seq, width] -> [batch, seq, width]; keyword arguments (mask, cache) go to every branch that names them."""
        a, b = self.run(*streams.enter(x, self.input), **kwargs)
        return streams.leave(a, b, x, self.output)

    def run(self, a: Tensor, b: Tensor, **kwargs: Any) -> Tuple[Tensor, Tensor]:
        """The two streams [batch, seq, width] before the first block -> those after the last."""
        given = check_kwargs(self._branches(), kwargs)
        if self.engine == "store" or not recording_needed():
            for block in self.executed():
                a, b = block(a, b, **given)
            return a, b
        return self._run_recorded(a, b, given)

    @without_dynamo
    def _run_recorded(self, a: Tensor, b: Tensor, given: Any) -> Tuple[Tensor, Tensor]:
        with self.visits.casts():
            if self.engine == "checkpoint":
                return run_segments(segments(self.executed(), self.checkpoint_every), (a, b), given)
            chain = Chain()
            for block in self.executed():
                a, b = block(a, b, chain=chain, **given)
            chain.finish()
            return a, b

    def inverse(self, a: Tensor, b: Tensor, **kwargs: Any) -> Tuple[Tensor, Tensor]:
        """The streams before the first block from those after the last: undoes `run`.

        Exact up to rounding, in eval mode or without dropout (random numbers are not replayed here).
        """
        given = check_kwargs(self._branches(), kwargs)
        for block in reversed(self.executed()):
            a, b = block.inverse(a, b, **given)
        return a, b

    def extra_repr(self) -> str:
        layers = sum(layers_of(block) for block in self.executed())
        return f"layers={layers}, input={self.input}, output={self.output}, engine={self.engine}"
