"""The world of instances that poprun starts: the same calls as `World`, carried by PopDist and Horovod instead of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, List, Optional, Sequence

from ipu_lean.config import Config
from ipu_lean.errors import RunError
from ipu_lean.ipu.dist import Distribution
from ipu_lean.train.world import World


@dataclass
class InstanceWorld(World):
    """`rank` of `size` instances; Lightning sees a world of one in each."""

    distribution: Distribution = field(default_factory=Distribution)

    @classmethod
    def of(cls, distribution: Distribution) -> InstanceWorld:
        """The world that PopDist describes."""
        return cls(rank=distribution.index, size=distribution.size, distribution=distribution)

    def sum(self, values: Sequence[float]) -> List[float]:
        """Element-wise sum over instances."""
        return self.distribution.sum([float(value) for value in values])

    def broadcast(self, value: Any) -> Any:
        """The first instance's `value`."""
        return self.distribution.broadcast(value)

    def gather(self, value: Any) -> List[Any]:
        """Every instance's `value`, by index."""
        return self.distribution.gather(value)

    def barrier(self) -> None:
        """Wait for the others."""
        self.distribution.sum([0.0])

    def on_first(self, action: Callable[[], None]) -> None:
        """Run `action` on the first instance, by PopDist."""
        self.distribution.on_first(action)

    def agree(self, error: Optional[Exception]) -> None:
        """Raise on every instance what the first one met."""
        text = self.broadcast(None if error is None else str(error))
        if error is not None:
            raise error
        if text is not None:
            raise RunError(text)


def world_of(config: Config) -> World:
    """The world of this process: poprun's instances, torch's process group, or a world of one."""
    distribution = Distribution.current(config)
    return World.current(config) if distribution.popdist is None else InstanceWorld.of(distribution)
