"""The ordinary residual stack, h = h + f(h), called as the reversible one is and with the same choices of memory."""
from __future__ import annotations

from typing import Any, Iterator, List, Optional, Sequence

from torch import Tensor, nn

from ipu_lean.errors import ConfigError

from .engine import recording_needed, run_segments, without_dynamo
from .plan import Planned, Segment
from .routing import check_kwargs, kwargs_for
from .visits import Visits, layers_of
from .visits import segments as cut


class ResidualBlock(nn.Module):
    """h = h + f(h) for each branch in order; [attention, FFN] is one layer of a pre-norm transformer.

    A branch is any module `f(x) -> [batch, seq, width]` without a residual of its own, already scaled by its multiplier.
    """

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        if not branches:
            raise ConfigError("a residual block needs at least one branch", value=0)
        self.branches = nn.ModuleList(branches)

    def forward(self, h: Tensor, **kwargs: Any) -> Tensor:
        """[batch, seq, width] -> [batch, seq, width]."""
        for branch in self.branches:
            h = h + branch(h, **kwargs_for(branch, kwargs))
        return h


class ResidualStack(Planned):
    """Residual blocks in a row.

    Args:
        blocks: in execution order; the same object may come several times (shared layers).
        engine: `store` (plain autograd) or `checkpoint` (keeps h at every `checkpoint_every`-th layer and runs the rest again). A
            residual stack cannot be inverted.
        checkpoint_every: layers (attention and FFN pairs) between two checkpoints.
        segments: another engine for some of the layers (plan.py), in place of `engine` and `checkpoint_every`.
    """

    engines, kind = ("store", "checkpoint"), "residual"

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        *,
        engine: str = "store",
        checkpoint_every: int = 1,
        segments: Optional[Sequence[Segment]] = None,
    ) -> None:
        super().__init__()
        self.plan(engine, checkpoint_every, segments)
        self.visits = Visits(blocks)
        self.blocks = self.visits.unique()

    def executed(self) -> List[nn.Module]:
        """The blocks in execution order, with repeats."""
        return self.visits.of(self.blocks)

    def _branches(self) -> Iterator[nn.Module]:
        return (branch for block in self.blocks for branch in block.branches)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """[batch, seq, width] -> [batch, seq, width]; keyword arguments (mask, cache) go to every branch that names them."""
        given = check_kwargs(self._branches(), kwargs)
        if self.keeps_everything() or not recording_needed():
            for block in self.executed():
                x = block(x, **given)
            return x
        return self._run_recorded(x, given)

    @without_dynamo
    def _run_recorded(self, x: Tensor, given: Any) -> Tensor:
        with self.visits.casts():
            for segment, part in self.parts([(block, 0) for block in self.executed()]):
                blocks = [block for block, _ in part]
                if segment.engine == "checkpoint":
                    (x,) = run_segments(cut(blocks, segment.checkpoint_every), (x,), given)
                else:
                    for block in blocks:
                        x = block(x, **given)
        return x

    def extra_repr(self) -> str:
        return f"layers={sum(layers_of(block) for block in self.executed())}, engine={self.engine}"
