"""What `memory.fused_update` cannot be joined with, each with its reason."""

from __future__ import annotations

from typing import Any, List, Tuple

from ipu_lean.config.layout import IPU_DEVICES
from ipu_lean.config.root import Config
from ipu_lean.errors import ConfigError

KEY = "memory.fused_update"


def check_fused(config: Config) -> None:
    """Raises ConfigError for the first key that does not go with an update inside the backward pass."""
    if not config.memory.fused_update:
        return
    if config.device in IPU_DEVICES:
        raise ConfigError(
            "PopTorch makes the update on the device and ignores Python's backward code",
            key=KEY,
            value=True,
            suggestion="remove it: on an IPU `ipu.accumulator: half` and `ipu.optimizer_state_offchip` save memory",
        )
    for key, value, fine, reason, way in _pairs(config):
        if not fine:
            raise ConfigError(f"`{KEY}` updates a weight as its gradient completes, and {reason}", key=key, value=value,
                              suggestion=f"{way}, or `{KEY}: false`")  # fmt: skip


def _pairs(config: Config) -> List[Tuple[str, Any, bool, str, str]]:
    """(key, value, whether it goes together, why not, way out)."""
    train, batch = config.train, config.batch
    return [
        ("train.processes", train.processes, train.processes == 1, "several processes would have to exchange it first",
         "use one process"),
        ("train.strategy", train.strategy, train.strategy not in ("ddp", "fsdp"),
         "several processes would have to exchange it first", "use `single`"),
        ("precision", config.precision, config.precision != "fp16-mixed",
         "whether the loss scale overflowed is known only when all gradients are there", "use `bf16-mixed`"),
        ("train.clip", train.clip, train.clip is None,
         "the global norm is known only when all gradients are there", "set `train.clip: null`"),
        ("batch.accumulation", batch.accumulation, batch.accumulation == 1,
         "gradients of several micro-batches are added up first, so they would all be alive", "use a larger `batch.micro`"),
        ("batch.replicas", batch.replicas, batch.replicas == 1,
         "replicas are run in turn here, and their gradients are added up first", "use a larger `batch.micro`"),
    ]  # fmt: skip
