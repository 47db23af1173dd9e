"""The global norm of the gradient, and clipping by it (Pascanu, Mikolov and Bengio 2013)."""

from __future__ import annotations

from typing import Iterable, List

import torch
import torch.distributed as dist

CLIP_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def gradients_of(parameters: Iterable[torch.nn.Parameter]) -> List[torch.Tensor]:
    """The gradients that exist."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def global_norm(gradients: List[torch.Tensor], *, sharded: bool, device: torch.device) -> torch.Tensor:
    """The 2-norm over all gradients, a scalar on `device`. `sharded`: each process holds a part of every gradient (FSDP)."""
    norm = combined_norm(norms_of(gradients), device)
    if sharded:
        square = norm.double().square()
        dist.all_reduce(square)
        norm = square.sqrt().float()
    return norm


def norms_of(gradients: List[torch.Tensor]) -> List[torch.Tensor]:
    """The 2-norm of each, a scalar; of 16-bit gradients in float32."""
    if any(gradient.dtype in (torch.bfloat16, torch.float16) for gradient in gradients):
        return [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return list(torch._foreach_norm(gradients)) if gradients else []


def combined_norm(norms: List[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The 2-norm of the whole from those of its parts, a scalar on `device`."""
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=device)


def clip_factor(norm: float, largest: float) -> float:
    """What the gradients are multiplied by so that their global norm becomes at most `largest`, rounded as in float32
    arithmetic.
    """
    return float(torch.clamp(largest / (torch.tensor(norm, dtype=torch.float32) + CLIP_EPS), max=1.0))


def divide(gradients: List[torch.Tensor], divisor: float) -> None:
    """Divide all of them in place. Division and multiplication by the reciprocal round differently."""
    if gradients and divisor != 1.0:
        torch._foreach_div_(gradients, divisor)


def scale_gradients(gradients: List[torch.Tensor], factor: float) -> None:
    """Multiply all of them in place."""
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)
