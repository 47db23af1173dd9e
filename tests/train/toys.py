"""A training step that needs no transformer: a two-layer bag of words with the metric sums of a language model."""

from __future__ import annotations

from typing import Any, Tuple

import torch
from torch import nn

from ipu_lean.optim import Schedule


class ToyModel(nn.Module):
    """Embedding, tanh layer, readout."""

    sum_names = ("loss", "correct", "tokens")

    def __init__(self, vocab: int = 11, width: int = 6, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embedding = nn.Embedding(vocab, width)
        self.hidden = nn.Linear(width, width)
        self.readout = nn.Linear(width, vocab)
        self.dropout = nn.Dropout(dropout)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).mul_(0.5).to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[batch, seq] -> [batch, seq, vocab]`"""
        return self.readout(self.dropout(torch.tanh(self.hidden(self.embedding(tokens)))))


class ToyStep(nn.Module):
    """(tokens, labels) -> (mean loss, float32 sums)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        logits = self.model(tokens.long()).float()
        flat = labels.long().reshape(-1)
        total = nn.functional.cross_entropy(logits.reshape(flat.numel(), -1), flat, ignore_index=-100, reduction="sum")
        counted = (flat != -100).sum()
        correct = (logits.reshape(flat.numel(), -1).argmax(-1) == flat).sum()
        return total / counted.clamp(min=1), torch.stack([total.detach(), correct.float(), counted.float()])


def make_sgd(lr: float = 0.1, **options: Any) -> Any:
    """A factory as TorchEngine wants it, with the group keys that schedules read."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, **options)
        for group in optimizer.param_groups:
            group["initial_lr"] = lr
        return optimizer

    return make


def make_adam(lr: float = 0.01) -> Any:
    """The same with Adam."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        for group in optimizer.param_groups:
            group["initial_lr"] = lr
        return optimizer

    return make


CONSTANT = Schedule("constant")
