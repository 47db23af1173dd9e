"""Small models and helpers that several tests share."""
from __future__ import annotations

from typing import Any, Callable, Iterator, List, Optional, Tuple

import torch
from torch import nn
from torch.nn import functional as F

import ipu_lean.ipu.emulator as poptorch


class Calls(nn.Module):
    """`forward` is a function of the module and its inputs."""

    def __init__(self, function: Callable[..., Any], width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


class Classifier(nn.Module):
    """Embedding, norm, two layers and cross entropy; returns (logits, loss)."""

    def __init__(self, vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.head = nn.Linear(2 * width, vocabulary)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.up(self.norm(self.embedding(tokens))))
        logits = self.head(h)
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1).long())
        return logits, poptorch.identity_loss(loss, "none")


def options(accumulation: int = 1, iterations: int = 1, replicas: int = 1,
            mode: Optional[poptorch.OutputMode] = None) -> poptorch.Options:
    made = poptorch.Options().deviceIterations(iterations).replicationFactor(replicas)
    made.Training.gradientAccumulation(accumulation)
    return made if mode is None else made.outputMode(mode)


def tokens(rows: int, length: int = 3, vocabulary: int = 11, seed: int = 0) -> Tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    both = [torch.randint(0, vocabulary, (rows, length), generator=generator, dtype=torch.int32) for _ in range(2)]
    return both[0], both[1]


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tuple[torch.Tensor, ...], iterations: int,
                micros: int) -> Iterator[List[float]]:
    """Plain torch training on what one executor call takes; yields each update's micro-batch losses."""
    pieces = [tensor.split(tensor.shape[0] // (iterations * micros)) for tensor in batch]
    for iteration in range(iterations):
        optimizer.zero_grad()
        losses = []
        for step in range(micros):
            loss = model(*[piece[iteration * micros + step] for piece in pieces])[-1]
            (loss / micros).backward()
            losses.append(loss.item())
        optimizer.step()
        yield losses


def gap(one: nn.Module, other: nn.Module) -> float:
    """The largest |u - v| / |u| over the parameters."""
    pairs = zip(one.parameters(), other.parameters())
    return max(((u - v).norm() / u.norm().clamp(min=1e-12)).item() for u, v in pairs)
