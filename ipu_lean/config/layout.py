"""Which IPU each part of the model stands on, and what follows from it: stages, IPUs, device iterations. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, List, Tuple

from ipu_lean.config import derived
from ipu_lean.config.root import Config
from ipu_lean.errors import ConfigError

IPU_DEVICES = ("ipu", "ipu-emulated")


@dataclass(frozen=True)
class Layout:
    """Where everything stands in one replica.

    Attributes:
        layers: number of layers on each IPU. embedding, head: IPU of the embedding and of the readout. norm: of the final norm,
            which stays with the last layer.
    """

    layers: Tuple[int, ...]
    embedding: int
    head: int

    @property
    def layer_ipus(self) -> List[int]:
        """IPU of each layer in execution order."""
        return [ipu for ipu, count in enumerate(self.layers) for _ in range(count)]

    @property
    def norm(self) -> int:
        """IPU of the final norm."""
        return self.layer_ipus[-1]

    @property
    def path(self) -> List[int]:
        """The IPUs that a micro-batch visits, each change once: [0, 1, 2, 0]. It starts on IPU 0 whatever the embedding's IPU
        is, because PopTorch counts from there (CompilerImpl.hpp:261).
        """
        path = [0]
        for ipu in (self.embedding, *self.layer_ipus, self.norm, self.head):
            if ipu != path[-1]:
                path.append(ipu)
        return path

    @property
    def ipus(self) -> int:
        """IPUs of one replica; PopTorch counts up to the highest number, gaps included (CompilerImpl.cpp:634)."""
        return max(self.path) + 1


def layout(config: Config) -> Layout:
    """The placement that the configuration asks for. ConfigError if the layers do not add up."""
    ipu = config.ipu
    layers = resolve_layers(ipu.layers_per_ipu, config.model.depth)
    last = len(layers) - 1
    head = ipu.head_ipu if ipu.head_ipu is not None else ipu.embedding_ipu if derived.tied(config.model) else last
    return Layout(tuple(layers), ipu.embedding_ipu, head)


def resolve_layers(given: Any, depth: int) -> List[int]:
    """`ipu.layers_per_ipu` with wildcards filled in: the first ones get one layer less where they cannot be equal."""
    if given is None:
        return [depth]
    wild = [index for index, count in enumerate(given) if count == -1]
    fixed = sum(count for count in given if count > 0)
    left = depth - fixed
    if given and min(given) < -1:
        raise ConfigError("each IPU holds 0 layers or more, or -1 for a share of the rest", key="ipu.layers_per_ipu", value=given)
    if left < 0 or (not wild and left):
        raise ConfigError(
            f"the layers placed are {fixed}, and model.depth is {depth}",
            key="ipu.layers_per_ipu",
            value=given,
            suggestion="place each layer exactly once" + (f", for example {_even(len(given), depth)}" if given else ""),
        )
    shares = dict(zip(wild, _even(len(wild), left))) if wild else {}
    return [shares.get(index, count) for index, count in enumerate(given)]


def _even(parts: int, total: int) -> List[int]:
    """`total` in `parts`, the later ones taking what is over: they keep fewer micro-batches alive."""
    return [total // parts + (1 if part >= parts - total % parts else 0) for part in range(parts)]


def stages(config: Config) -> int:
    """F: forward pipeline stages; 1 where nothing is pipelined."""
    found = layout(config)
    return len(found.path) if config.ipu.execution == "pipelined" and found.ipus > 1 else 1


def eval_device_iterations(config: Config) -> int:
    """Micro-batches of each replica in one evaluation call."""
    if config.ipu.eval_device_iterations is not None:
        return config.ipu.eval_device_iterations
    return max(stages(config), config.batch.device_iterations)


def is_half(config: Config) -> bool:
    """Whether weights and activations are fp16."""
    return config.precision == "fp16-ipu"


def accumulator(config: Config) -> str:
    """`float` or `half`: type of the gradient accumulator."""
    return config.ipu.accumulator or ("half" if is_half(config) else "float")


def first_moment(config: Config) -> str:
    """`float` or `half`: type of Adam's first moment and of SGD's velocity."""
    return config.ipu.first_moment or ("half" if is_half(config) else "float")


def stochastic_rounding(config: Config) -> bool:
    """Whether training rounds stochastically."""
    return is_half(config) if config.ipu.stochastic_rounding is None else config.ipu.stochastic_rounding


def loss_scaling(config: Config) -> float:
    """The static loss scale, or the automatic one's beginning. Gradients of hidden layers shrink with width under muP, so the
    fp16 scale grows with it.
    """
    given = config.ipu.loss_scaling
    scale = float(given) if isinstance(given, (int, float)) else 1024.0 if is_half(config) else 1.0
    base = derived.base_model(config)
    return scale if base is None or not is_half(config) else scale * config.model.width / base.width
