"""Mixed precision on CPU and GPU: what autocast runs in, the fp16 loss scale, and which pairs of device and precision are
refused.

`bf16-mixed` and `fp16-mixed` keep weights, gradients and optimizer state in fp32; matrix products run in 16 bits (torch's
autocast lists). fp16 has 5 exponent bits, so its gradients underflow unless the loss is multiplied by a scale first. `bf16-pure`
keeps weights, gradients and optimizer state in bf16 too; norms, softmax, rotary positions and the loss are computed in fp32, and
AnyPrecisionAdamW keeps what rounding the weights would lose.
"""

from __future__ import annotations

import contextlib
from typing import Any, ContextManager, Dict, Optional

import torch
from torch import nn

from ipu_lean import _compat
from ipu_lean.config import Config, LossScaleConfig
from ipu_lean.config.layout import IPU_DEVICES
from ipu_lean.errors import ConfigError, EnvironmentProblem, RunError
from ipu_lean.optim.fused import check_torch

AUTOCAST: Dict[str, Optional[torch.dtype]] = {
    "fp32": None,
    "bf16-mixed": torch.bfloat16,
    "fp16-mixed": torch.float16,
    "bf16-pure": None,
}
"""The precisions of TorchEngine and the type that autocast runs their matrix products in (None: no autocast)."""


def check_precision(config: Config, training: bool = True) -> None:
    """Refuse what this engine or this machine cannot honour; less where nothing is trained.

    Raises:
        ConfigError: a precision that only IPUs have.
        EnvironmentProblem: no GPU, a GPU without bf16, a torch whose CPU autocast has no fp16, or that cannot update in the
            backward pass.
    """
    if config.device in IPU_DEVICES:
        return  # the configuration's own rules have seen to it
    if training and config.memory.fused_update:
        check_torch()
    if config.precision not in AUTOCAST:
        raise ConfigError(
            f"this is the IPU's arithmetic, and the device is {config.device}",
            key="precision",
            value=config.precision,
            suggestion=f"use one of {', '.join(AUTOCAST)}",
        )
    if config.device == "gpu" and not torch.cuda.is_available():
        raise EnvironmentProblem(
            f"`device: gpu` needs a CUDA or ROCm device, and torch {torch.__version__} sees none. Use `device: cpu`, or install "
            "the build of torch that matches your driver."
        )
    if config.device == "gpu" and config.precision.startswith("bf16") and not torch.cuda.is_bf16_supported():
        raise EnvironmentProblem("this GPU has no bf16. Use `precision: fp16-mixed` or `fp32`.")
    if config.device == "cpu" and config.precision == "fp16-mixed" and _compat.TORCH < (2, 3):
        raise EnvironmentProblem(
            f"fp16 autocast on CPU needs torch 2.3 or newer, and this is {torch.__version__}. Use `precision: bf16-mixed` or "
            "`fp32`."
        )


def to_precision(model: nn.Module, precision: str) -> nn.Module:
    """`model`, its parameters changed in place to the type that the precision holds weights in: bf16 for `bf16-pure`."""
    return model.to(torch.bfloat16) if precision == "bf16-pure" else model


def autocast(precision: str, device_type: str) -> ContextManager[Any]:
    """The context in which the forward pass runs; `device_type` is "cpu" or "cuda"."""
    dtype = AUTOCAST[precision]
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast(device_type, dtype=dtype)


class LossScale:
    """The dynamic loss scale of fp16-mixed: halved when a gradient overflows, doubled after `window` clean updates.

    The rule is that of torch's GradScaler; kept here because it also needs a floor, plain-number state, and one decision for all
    processes (the caller passes the global gradient norm, which every process agrees on, under FSDP too).
    """

    def __init__(self, settings: LossScaleConfig) -> None:
        self.settings, self.scale, self.clean = settings, float(settings.init), 0

    def update(self, overflow: bool, step: int) -> None:
        """Account for one update. RunError when the scale would fall below the minimum."""
        if not overflow:
            self.clean += 1
            if self.clean == self.settings.window:
                self.scale, self.clean = self.scale * 2.0, 0
            return
        if self.scale / 2.0 < self.settings.minimum:
            raise RunError(
                f"gradients overflow fp16 at step {step} even with a loss scale of {self.scale:g} (train.fp16_scale.minimum is "
                f"{self.settings.minimum:g}). Lower the learning rate, or use bf16-mixed or fp32."
            )
        self.scale, self.clean = self.scale / 2.0, 0

    def state_dict(self) -> Dict[str, Any]:
        """Plain numbers."""
        return {"scale": self.scale, "clean": self.clean}

    def load_state_dict(self, state: Dict[str, Any]) -> None:
        """Go on where `state` was taken."""
        self.scale, self.clean = float(state["scale"]), int(state["clean"])
