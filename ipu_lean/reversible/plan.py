"""Which part of a stack is kept, recomputed or inverted."""
from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

from torch import nn

from ipu_lean.errors import ConfigError

from .visits import layers_of

Visit = Tuple[nn.Module, int]


class Segment(NamedTuple):
    """Some layers in a row and the engine that their backward pass runs with.

    Attributes:
        layers: attention and FFN pairs, counted with repeats.
        engine: `store`, `invert` or `checkpoint`.
        checkpoint_every: layers between two checkpoints; only `checkpoint` reads it.
    """

    layers: int
    engine: str
    checkpoint_every: int = 1


def check_segments(segments: Sequence[Segment], engines: Sequence[str], kind: str) -> List[Segment]:
    """The segments as a list; ConfigError for an engine that a `kind` stack does not have, or for empty segments."""
    for place, segment in enumerate(segments):
        key = "memory.engine" if len(segments) == 1 else f"memory.segments.{place}"
        if segment.engine not in engines:
            raise ConfigError(
                f"a {kind} stack runs with one of: {', '.join(engines)}",
                key=key,
                value=segment.engine,
                suggestion="set `model.stack.kind: reversible` for `invert`" if segment.engine == "invert" else None,
            )
        if segment.checkpoint_every < 1 or segment.layers < 1:
            name = "layers" if segment.layers < 1 else "checkpoint_every"
            key = "memory.checkpoint_every" if len(segments) == 1 else f"{key}.{name}"
            raise ConfigError("must be at least 1", key=key, value=getattr(segment, name))
    return list(segments)


def divide(visited: Sequence[Visit], segments: Sequence[Segment]) -> List[Tuple[Segment, List[Visit]]]:
    """The visits of each segment. Blocks are not cut: ConfigError if a segment would end inside one, or does not add up."""
    found: List[Tuple[Segment, List[Visit]]] = []
    place, layers = 0, [layers_of(block) for block, _ in visited]
    if sum(segment.layers for segment in segments) != sum(layers):
        raise ConfigError(
            f"the segments have {sum(segment.layers for segment in segments)} layers and the stack has {sum(layers)}",
            key="memory.segments",
        )
    for segment in segments:
        first, held = place, 0
        while held < segment.layers:
            held += layers[place]
            place += 1
        if held > segment.layers:
            raise ConfigError(
                f"a block of {layers[place - 1]} layers would be cut, which order aaff does not allow",
                key="memory.segments",
                value=segment.layers,
                suggestion="use even numbers of layers",
            )
        found.append((segment, list(visited[first:place])))
    return found


class Planned(nn.Module):
    """What the two kinds of stack share: segments, or one engine for all."""

    engines: Tuple[str, ...] = ()
    kind = ""

    def plan(self, engine: str, checkpoint_every: int, segments: Optional[Sequence[Segment]]) -> None:
        """Takes the choice of `segments`, or of one engine for all layers if there are none."""
        check_segments([Segment(1, engine, checkpoint_every)], self.engines, self.kind)
        self._engine, self.checkpoint_every = engine, checkpoint_every
        self.segments = None if segments is None else check_segments(segments, self.engines, self.kind)

    @property
    def engine(self) -> str:
        """The engine of all layers, or `segments`. Setting it gives up segments."""
        return self._engine if self.segments is None else "segments"

    @engine.setter
    def engine(self, engine: str) -> None:
        self._engine, self.segments = engine, None

    def keeps_everything(self) -> bool:
        """Whether no layer is run a second time."""
        return self._engine == "store" if self.segments is None else all(s.engine == "store" for s in self.segments)

    def parts(self, visited: Sequence[Visit]) -> List[Tuple[Segment, List[Visit]]]:
        """The visits of each segment, in order."""
        if self.segments is None:
            return [(Segment(len(visited), self._engine, self.checkpoint_every), list(visited))]
        return divide(visited, self.segments)
