"""A reversible stack: blocks of branches that write two streams in turn, and the choice of what its backward pass keeps."""
from __future__ import annotations

from typing import Any, Iterator, List, Optional, Sequence, Tuple, Union

from torch import Tensor, nn

from ipu_lean.errors import ConfigError

from . import streams
from .couplings import Coupling, make_coupling
from .engine import Chain, recording_needed, run_segments, without_dynamo
from .plan import Planned, Segment
from .routing import check_kwargs, kwargs_for
from .visits import Visits, layers_of
from .visits import segments as cut


class ReversibleBlock(nn.Module):
    """Half-steps of a coupling, one for each branch in order.

    A branch is any module `f(x) -> [batch, seq, width]` (twice the width for `affine`) without a residual of its own, already
    scaled by its multiplier. With a coupling that swaps, [attention, FFN] is one layer of RevNet and Reformer: attention writes
    the first stream, the FFN the second. [attention 1, attention 2, FFN 1, FFN 2] is two layers in the order `aaff`: each stream
    receives both kinds.

    Args:
        branches: executed in this order; their number is even, so that the streams leave in the order in which they came.
        coupling: how a branch's output enters the streams (couplings.py), by name or made.
    """

    def __init__(self, branches: Sequence[nn.Module], coupling: Union[str, Coupling] = "additive") -> None:
        super().__init__()
        if not branches or len(branches) % 2:
            raise ConfigError("a reversible block needs an even number of branches, at least two", value=len(branches))
        self.branches = nn.ModuleList(branches)
        self.coupling = make_coupling(coupling) if isinstance(coupling, str) else coupling

    def forward(
        self, a: Tensor, b: Tensor, step: int = 0, chain: Optional[Chain] = None, **kwargs: Any
    ) -> Tuple[Tensor, Tensor]:
        """Two streams [batch, seq, width] -> the two streams after every branch.

        Args:
            step: number of the first half-step in the stack; couplings that count read it.
            chain: the engine's record of this call, from the stack; without it nothing special is saved or freed.
        """
        for branch in self.branches:
            own = kwargs_for(branch, kwargs)
            if chain is None:
                fx = branch(self.coupling.read(a, b, step), **own)
                a, b = self.coupling.forward(a, b, fx, step)
            else:
                a, b = chain.half_step(branch, self.coupling, a, b, step, own)
            step += 1
        return a, b

    def inverse(self, a: Tensor, b: Tensor, step: int = 0, **kwargs: Any) -> Tuple[Tensor, Tensor]:
        """The streams that `forward` took, from those that it returned. Branches must not draw random numbers (eval mode)."""
        last = step + len(self.branches) - 1
        for back, branch in enumerate(reversed(self.branches)):
            fx = branch(self.coupling.read_back(a, b, last - back), **kwargs_for(branch, kwargs))
            a, b = self.coupling.inverse(a, b, fx, last - back)
        return a, b

    def extra_repr(self) -> str:
        return f"coupling={self.coupling}"


class ReversibleStack(Planned):
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
        segments: another engine for some of the layers (plan.py), in place of `engine` and `checkpoint_every`.
        width: of a stream; only the output `gate-channels` needs it.
    Raises:
        ConfigError: an unknown choice, a result that would mean nothing, or blocks of different couplings.
    """

    engines, kind = ("invert", "store", "checkpoint"), "reversible"

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        *,
        input: str = "duplicate",
        output: str = "sum-minus-input",
        engine: str = "invert",
        checkpoint_every: int = 1,
        segments: Optional[Sequence[Segment]] = None,
        width: Optional[int] = None,
    ) -> None:
        super().__init__()
        self.plan(engine, checkpoint_every, segments)
        self.input = streams.check_choice(input, streams.INPUTS, "model.stack.input")
        self.output = streams.check_choice(output, (*streams.OUTPUTS, *streams.GATES), "model.stack.output")
        self.visits = Visits(blocks)
        self.blocks = self.visits.unique()
        self.coupling = _one_coupling(self.blocks)
        streams.check_pair(self.coupling.name, input, output)
        self.gate = streams.make_gate(output, width)

    def executed(self) -> List[nn.Module]:
        """The blocks in execution order, with repeats."""
        return self.visits.of(self.blocks)

    def visited(self) -> List[Tuple[nn.Module, int]]:
        """(block, number of its first half-step) in execution order: a block that comes twice has two numbers."""
        found, step = [], 0
        for block in self.executed():
            found.append((block, step))
            step += len(block.branches)
        return found

    def _branches(self) -> Iterator[nn.Module]:
        return (branch for block in self.blocks for branch in block.branches)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """[batch, seq, width] -> [batch, seq, width], or as the input and output have it (streams.py).

        Keyword arguments (mask, cache) go to every branch that names them.
        """
        a, b = self.run(*self.enter(x), **kwargs)
        return self.leave(a, b, x)

    def enter(self, x0: Tensor) -> Tuple[Tensor, Tensor]:
        """The stack's input -> the two streams before the first block."""
        return streams.enter(self.coupling.admit(x0), self.input, self.coupling.reads_second)

    def leave(self, a: Tensor, b: Tensor, x0: Tensor) -> Tensor:
        """The two streams after the last block, and the stack's input -> the stack's result."""
        x0 = self.coupling.admit(x0) if self.output == "sum-minus-input" else x0
        return streams.leave(a, b, x0, self.output, self.gate)

    def left_behind(self, a: Tensor, b: Tensor) -> Tensor:
        """The stack's input from the two streams before the first block: undoes `enter` (a gridded input stays on its grid)."""
        return streams.left_behind(a, b, self.input, self.coupling.reads_second)

    def run(self, a: Tensor, b: Tensor, **kwargs: Any) -> Tuple[Tensor, Tensor]:
        """The two streams [batch, seq, width] before the first block -> those after the last."""
        given = check_kwargs(self._branches(), kwargs)
        if self.keeps_everything() or not recording_needed():
            for block, step in self.visited():
                a, b = block(a, b, step=step, **given)
            return a, b
        return self._run_recorded(a, b, given)

    @without_dynamo
    def _run_recorded(self, a: Tensor, b: Tensor, given: Any) -> Tuple[Tensor, Tensor]:
        with self.visits.casts():
            for segment, part in self.parts(self.visited()):
                if segment.engine == "checkpoint":
                    runs = cut([block for block, _ in part], segment.checkpoint_every)
                    a, b = run_segments(runs, (a, b), given, step=part[0][1])
                    continue
                chain = Chain() if segment.engine == "invert" else None
                for block, step in part:
                    a, b = block(a, b, step=step, chain=chain, **given)
                if chain is not None:
                    chain.finish()
            return a, b

    def inverse(self, a: Tensor, b: Tensor, **kwargs: Any) -> Tuple[Tensor, Tensor]:
        """The streams before the first block from those after the last: undoes `run`.

        Exact up to rounding, in eval mode or without dropout (random numbers are not replayed here).
        """
        given = check_kwargs(self._branches(), kwargs)
        for block, step in reversed(self.visited()):
            a, b = block.inverse(a, b, step=step, **given)
        return a, b

    def extra_repr(self) -> str:
        layers = sum(layers_of(block) for block in self.executed())
        parts = f"coupling={self.coupling}, input={self.input}, output={self.output}"
        return f"layers={layers}, {parts}, engine={self.engine}"


def _one_coupling(blocks: Sequence[nn.Module]) -> Coupling:
    found = {repr(block.coupling): block.coupling for block in blocks}
    if len(found) > 1:
        raise ConfigError(f"the blocks of a stack share one coupling; these have {', '.join(sorted(found))}")
    return next(iter(found.values()))
