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
    if gradients:
        if any(gradient.dtype in (torch.bfloat16, torch.float16) for gradient in gradients):
            norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        else:
            norms = torch._foreach_norm(gradients)
        norm = torch.linalg.vector_norm(torch.stack(norms))
    else:
        norm = torch.zeros((), device=device)
    if sharded:
        square = norm.double().square()
        dist.all_reduce(square)
        norm = square.sqrt().float()
    return norm


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
