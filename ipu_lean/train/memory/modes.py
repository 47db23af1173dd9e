"""The precisions, with and without updates in the backward pass, that are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional, Sequence

from ipu_lean.config import Config, OptimizerConfig
from ipu_lean.config.checks import check
from ipu_lean.config.layout import IPU_DEVICES
from ipu_lean.errors import ConfigError, did_you_mean

SUMMATIONS = ("kahan", "split", "stochastic", "none")
FUSED = "+fused"


@dataclass(frozen=True)
class Mode:
    """One row of the table; `summation` belongs to bf16-pure, `fused` is memory.fused_update."""

    precision: str
    summation: Optional[str] = None
    fused: bool = False

    @property
    def name(self) -> str:
        """Such as `bf16-pure/kahan+fused`."""
        return self.precision + (f"/{self.summation}" if self.summation else "") + (FUSED if self.fused else "")


MODES = (
    *(Mode(precision, None, fused) for precision in ("fp32", "bf16-mixed") for fused in (False, True)),
    Mode("fp16-mixed"),
    *(Mode("bf16-pure", summation, fused) for summation in SUMMATIONS for fused in (False, True)),
)
"""All that a CPU or GPU can do. (fp16-mixed cannot be fused: its loss scale needs all gradients.)"""


def chosen(names: Optional[Sequence[str]]) -> List[Mode]:
    """The modes of these names; all for None. ConfigError for a name that there is not."""
    by_name = {mode.name: mode for mode in MODES}
    if names is not None and not names:
        raise ConfigError("this names no mode", key="--modes", suggestion=f"they are {', '.join(by_name)}")
    for name in names or ():
        if name == "fp16-ipu":
            raise ConfigError("this is a formula, and always listed", key="--modes", value=name, suggestion="leave it out")
        if name not in by_name:
            if name == f"fp16-mixed{FUSED}":
                rule = "there is no such mode: an overflow in one gradient skips the whole update, so all are seen first"
                raise ConfigError(rule, key="--modes", value=name, suggestion=f"name fp16-mixed, or bf16-mixed{FUSED}")
            begun = [other for other in by_name if other.startswith(f"{name}/")]  # bf16-pure: its summations
            near = None if begun else did_you_mean(name, by_name)
            hint = f"did you mean {near}?" if near else f"they are {', '.join(begun or by_name)}"
            raise ConfigError("there is no such mode", key="--modes", value=name, suggestion=hint)
    return list(MODES) if names is None else [by_name[name] for name in names]


def on_device(config: Config) -> Config:
    """As it is measured here: one micro-batch, in one process, nothing compiled; an IPU's configuration on the CPU."""
    batch = config.batch.model_copy(update={"accumulation": 1, "replicas": 1, "device_iterations": 1})
    train = config.train.model_copy(update={"strategy": "auto", "processes": 1, "compile": "none"})
    changes = {"batch": batch, "train": train, "sweep": None, "study": None}
    if config.device in IPU_DEVICES:
        memory = config.memory.model_copy(update={"ipu_backward": "recompute"})
        changes.update(device="cpu", ipu=type(config.ipu)(), memory=memory)
    return config.model_copy(update=changes)


def with_mode(config: Config, mode: Mode) -> Config:
    """`config` (from `on_device`) in this mode. ConfigError where its other keys do not allow that."""
    default = OptimizerConfig()
    own = {"summation": mode.summation or default.summation}
    if mode.precision != "bf16-pure":
        own["variance"] = default.variance
    changes = {
        "precision": mode.precision,
        "optimizer": config.optimizer.model_copy(update=own),
        "memory": config.memory.model_copy(update={"fused_update": mode.fused}),
        "train": config.train.model_copy(update={"clip": None} if mode.fused else {}),
    }
    changed = config.model_copy(update=changes)
    check(changed)
    return changed
