"""Next-token cross entropy whose logits are never all alive at once.

Logits `[tokens, vocab]` are the largest tensor of a language model with a small width. `chunked_cross_entropy` computes them for
some tokens at a time, and their gradient right there, while they exist; what is kept for the backward pass is the gradient with
respect to the hidden states and to the readout's tensors, which autograd would make anyway. Nothing is computed twice, so no
random number is drawn twice. (The idea is that of Liger kernel's fused linear cross entropy, Hsu et al. 2024.)
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from ipu_lean.nn.transforms import transformed

IGNORED = -100
Readout = Callable[[torch.Tensor], torch.Tensor]
LOGIT_BYTES = 32 * 2**20  # what automatic chunks aim at


def automatic_chunk(tokens: int, vocab: int) -> int:
    """Tokens in a chunk so that its float32 logits take about 32 MiB; 0 (not chunked) if all of them do."""
    chunk = max(1, LOGIT_BYTES // (4 * vocab))
    return 0 if chunk >= tokens else chunk


def chunked_cross_entropy(
    h: torch.Tensor, labels: torch.Tensor, readout: Readout, chunk: int = 0, plain: bool = False
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Mean cross entropy of `readout(h)` against `labels`, and its sums.

    Args:
        h: `[batch, seq, width]`, the hidden states.
        labels: integers `[batch, seq]`; -100 is ignored.
        readout: hidden states `[tokens, width]` -> logits `[tokens, vocab]`. If it is a module, gradients reach its
            `tensors()`, or its parameters if it has no such method. A plain function is called on the plain path only.
        chunk: tokens whose logits are alive at once; 0 for all.
        plain: ordinary operations only (logits are then kept by autograd): what PopTorch can trace, since it ignores the backward
            code of Python functions. Also taken under `torch.func` transforms, and without gradients (evaluation).

    Returns: (loss, sums): loss = sum / max(1, count), as PopTorch has it, so a batch without labels gives 0; sums is
        float32 `[3]`: loss summed over tokens, correct predictions, tokens counted.
    """
    x, y = h.reshape(-1, h.shape[-1]), labels.reshape(-1)
    size = x.shape[0] if chunk < 1 else min(chunk, x.shape[0])
    count = (y != IGNORED).sum(dtype=torch.float32)
    saving = torch.is_grad_enabled() and size < x.shape[0] and not plain and isinstance(readout, nn.Module)
    if saving and not _any_transformed(x, readout):
        total, correct = _GradientInForward.apply(readout, size, y, x, *_tensors(readout))
    else:
        parts = [_plain_sums(readout, x[i : i + size], y[i : i + size]) for i in range(0, x.shape[0], size)]
        total = parts[0][0] if len(parts) == 1 else torch.stack([part[0] for part in parts]).sum()
        correct = parts[0][1] if len(parts) == 1 else torch.stack([part[1] for part in parts]).sum()
    sums = torch.stack([total.detach().float(), correct.detach().float(), count])
    return total / count.clamp(min=1.0), sums


def _plain_sums(readout: Readout, x: torch.Tensor, y: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """(summed loss, correct predictions) of some tokens."""
    logits = readout(x)
    logits = logits.to(_wide(logits.dtype))
    correct = (logits.detach().argmax(-1) == y).sum(dtype=torch.float32)
    if not transformed(logits):
        # PopART gives a summed loss that feeds other operations the shape (1,) (RemoveSurplusIdentityLosses.cpp:71).
        return F.cross_entropy(logits, y.long(), reduction="sum", ignore_index=IGNORED).reshape(()), correct
    kept = y != IGNORED  # torch 2.0's cross entropy takes -100 for an index under vmap
    target = torch.where(kept, y, torch.zeros_like(y)).long()[:, None]
    losses = torch.logsumexp(logits, -1) - logits.gather(-1, target).squeeze(-1)
    return torch.where(kept, losses, torch.zeros_like(losses)).sum(), correct


def _tensors(readout: nn.Module) -> List[torch.Tensor]:
    """What the readout reads. `tensors()` goes by attribute, so it finds what stands in for parameters under FSDP as well."""
    own = getattr(readout, "tensors", None)
    return list(own()) if own is not None else list(readout.parameters())


def _any_transformed(x: torch.Tensor, readout: nn.Module) -> bool:
    return transformed(x) or any(transformed(tensor) for tensor in _tensors(readout))


class _GradientInForward(torch.autograd.Function):
    """(summed loss, correct) of all tokens; the gradients are taken chunk by chunk in the forward pass."""

    @staticmethod
    def forward(ctx: Any, readout: nn.Module, size: int, y: torch.Tensor, x: torch.Tensor, *tensors: torch.Tensor) -> Any:
        """x `[tokens, width]`, y `[tokens]`."""
        wanted = [bool(flag) for flag in ctx.needs_input_grad[3:]]
        sources = [tensor for tensor, flag in zip(tensors, wanted[1:]) if flag]
        x_grad = torch.empty_like(x) if wanted[0] else None
        grads = [torch.zeros_like(tensor, dtype=_wide(tensor.dtype)) for tensor in sources]
        total, correct = x.new_zeros((), dtype=_wide(x.dtype)), torch.zeros((), device=x.device)
        for i in range(0, x.shape[0], size):
            rows = slice(i, i + size)
            loss, right = _chunk_of(readout, x[rows], y[rows], None if x_grad is None else x_grad[rows], sources, grads)
            total += loss
            correct += right
        ctx.wanted = wanted
        kept = [] if x_grad is None else [x_grad]
        ctx.save_for_backward(*kept, *[grad.to(tensor.dtype) for grad, tensor in zip(grads, sources)])
        ctx.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor, _: Any) -> Any:
        """The stored gradients times the loss's."""
        saved = iter(ctx.saved_tensors)
        scaled = [next(saved) * grad_total if flag else None for flag in ctx.wanted]
        return (None, None, None, *scaled)


def _chunk_of(
    readout: nn.Module, x: torch.Tensor, y: torch.Tensor, x_grad: Optional[torch.Tensor], sources: List[torch.Tensor],
    grads: List[torch.Tensor],
) -> Tuple[torch.Tensor, torch.Tensor]:
    """(summed loss, correct) of a chunk; its gradients go into `x_grad` and are added to `grads`, those of `sources`.

    A function of its own, so that a chunk's logits and the readout's gradient are gone before the next chunk's are made.
    """
    wanted = x_grad is not None or bool(sources)
    part = x.detach().requires_grad_(x_grad is not None)
    with torch.set_grad_enabled(wanted):
        logits = readout(part)
    loss, right, logit_grad = _loss_and_gradient(logits.detach(), y, wanted)
    if logit_grad is not None and logits.requires_grad:
        found = list(torch.autograd.grad(logits, ([] if x_grad is None else [part]) + sources, logit_grad))
        if x_grad is not None:
            x_grad.copy_(found.pop(0))
        for grad, new in zip(grads, found):
            grad.add_(new)
    return loss, right


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _loss_and_gradient(
    logits: torch.Tensor, y: torch.Tensor, gradient: bool
) -> Tuple[torch.Tensor, torch.Tensor, Optional[torch.Tensor]]:
    """(summed loss, correct, d loss / d logits `[tokens, vocab]` or None).

    The gradient is softmax(logits) - one_hot(y), zero in ignored rows. It takes the place of the logits where they are float32:
    a linear readout keeps nothing of its output, and autograd would notice if another one did.
    """
    kept = (y != IGNORED)[:, None]
    target = torch.where(kept, y[:, None], torch.zeros_like(y[:, None])).long()
    wide = logits.to(_wide(logits.dtype))
    top, best = wide.max(-1, keepdim=True)
    score = wide.gather(-1, target) - top
    exponentials = wide.sub_(top).exp_()
    normaliser = exponentials.sum(-1, keepdim=True)
    losses = normaliser.log() - score
    loss = torch.where(kept, losses, torch.zeros_like(losses)).sum()
    right = (best == y[:, None]).sum(dtype=torch.float32)
    if not gradient:
        return loss, right, None
    probabilities = exponentials.mul_(kept / normaliser)
    probabilities.scatter_add_(-1, target, -kept.to(probabilities.dtype))
    return loss, right, probabilities.to(logits.dtype)


def split_sums(sums: Sequence[float]) -> Tuple[float, float, float]:
    """(mean loss, accuracy, tokens) of summed sums; perplexity is exp(mean loss)."""
    loss, correct, tokens = (float(value) for value in sums)
    return loss / max(1.0, tokens), correct / max(1.0, tokens), tokens
