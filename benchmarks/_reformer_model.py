"""The published Reformer, six layers, as Hugging Face's and as ours with the same weights and rotations, for reformer.py."""

from __future__ import annotations

from typing import Any, Callable, Dict, Tuple

import _reformer_layers as layers
import torch
import torch.nn.functional as F
from torch import nn

from ipu_lean.config import make_config
from ipu_lean.models import TrainStep, build_model
from ipu_lean.models.convert import read_settings, read_weights
from ipu_lean.models.reformer import hashing

VOCAB = 320


def theirs(seq: int) -> nn.Module:
    """Their model: local and LSH in turn, width 256, 2 heads of 64, axial positions on a square of `seq` places, no dropout."""
    layers.published()
    from transformers import ReformerConfig, ReformerModelWithLMHead

    side = int(seq**0.5)
    assert side * side == seq, "a square number of tokens"
    config = ReformerConfig(
        attn_layers=["local", "lsh"] * 3,
        num_attention_heads=2,
        is_decoder=True,
        use_cache=False,
        axial_pos_shape=(side, side),
        max_position_embeddings=seq,
        hash_seed=layers.SEED,
        hidden_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0,
        lsh_attention_probs_dropout_prob=0.0,
        architectures=["ReformerModelWithLMHead"],
    )
    torch.manual_seed(0)
    return ReformerModelWithLMHead(config).train()


def ours(peer: nn.Module, kept: int = 0) -> nn.Module:
    """Our model read from theirs, with the rotations that theirs draws; the last `kept` layers keep their activations."""
    read = read_settings(peer.config.to_dict())
    sections: Dict[str, Any] = {"mup": {"parametrization": "standard"}}
    sections["data"] = {"tokenizer": {"kind": "bpe", "path": "not read here"}}
    sections["memory"] = {"keep_last": kept}
    model = build_model(make_config(model=read.section, **sections), VOCAB)
    model.load_state_dict(read_weights(read.family, model, peer.state_dict()))
    for attention in hashing(model):
        torch.manual_seed(layers.SEED)
        attention.rotations.copy_(torch.randn(attention.rotations.shape))
    return model.train()


def tokens_of(seq: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """(tokens, labels) `[1, seq]`."""
    text = torch.randint(3, VOCAB, (1, seq + 1), generator=torch.Generator().manual_seed(2))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def losses(seq: int, models: Dict[str, nn.Module]) -> Dict[str, Callable[[], torch.Tensor]]:
    """The mean loss of each on the same tokens, to be differentiated."""
    tokens, labels = tokens_of(seq)

    def ours_of(whole: nn.Module) -> Callable[[], torch.Tensor]:
        return lambda: whole(tokens, labels)[0]

    def theirs_of(peer: nn.Module) -> Callable[[], torch.Tensor]:
        return lambda: F.cross_entropy(peer(tokens).logits.view(-1, VOCAB), labels.view(-1))

    return {name: theirs_of(model) if name == "theirs" else ours_of(TrainStep(model)) for name, model in models.items()}


def step_of(model: nn.Module, loss: Callable[[], torch.Tensor]) -> Callable[[], Any]:
    """A training step with torch's AdamW. Learning rate zero: so that all rounds time the same model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)

    def step() -> None:
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()

    return step
