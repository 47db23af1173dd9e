"""Attention layers for reformer.py: ours, Hugging Face's with the same weights and rotations, and full attention."""

from __future__ import annotations

import sys
from typing import Any, Callable, Dict, List, Tuple

import torch
from torch import nn

from ipu_lean.nn import CausalSelfAttention
from ipu_lean.nn.attention.hashing import bucket_factors
from ipu_lean.nn.attention.local import LocalSelfAttention
from ipu_lean.nn.attention.lsh import LSHSelfAttention

WIDTH, HEADS, HEAD_SIZE, CHUNK, SEED = 256, 4, 64, 64, 11
KINDS = {"local": 0, "LSH, 1 round": 1, "LSH, 2 rounds": 2, "LSH, 4 rounds": 4}
"""Name: rounds of hashing."""
Step = Callable[[], Any]


def published() -> Any:
    """Hugging Face's module. A torchvision that does not match torch would keep transformers from importing it."""
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
    import transformers
    from transformers.models.reformer import modeling_reformer

    transformers.logging.set_verbosity_error()
    return modeling_reformer


class PublishedLayer(nn.Module):
    """Hugging Face's attention with its output projection: what our layers hold in one module."""

    def __init__(self, attention: nn.Module, output: nn.Module) -> None:
        super().__init__()
        self.attention, self.output = attention, output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[batch, seq, width] -> [batch, seq, width]`."""
        return self.output(self.attention(x).hidden_states)


def theirs(rounds: int, seq: int) -> nn.Module:
    """Their layer, LSH with that many rounds, or local attention for 0."""
    from transformers import ReformerConfig

    module = published()
    config = ReformerConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        attention_head_size=HEAD_SIZE,
        is_decoder=True,
        axial_pos_embds=False,
        max_position_embeddings=seq,
        lsh_attn_chunk_length=CHUNK,
        local_attn_chunk_length=CHUNK,
        num_hashes=max(rounds, 1),
        num_buckets=None,
        hash_seed=SEED,
        attn_layers=["lsh" if rounds else "local"],
        hidden_dropout_prob=0.0,
        lsh_attention_probs_dropout_prob=0.0,
        local_attention_probs_dropout_prob=0.0,
    )
    torch.manual_seed(0)
    attention = module.LSHSelfAttention(config) if rounds else module.LocalSelfAttention(config)
    return PublishedLayer(attention, module.ReformerSelfOutput(config))


def ours(rounds: int, seq: int, peer: nn.Module) -> nn.Module:
    """Our layer with the peer's weights and rotations."""
    if rounds:
        layer: nn.Module = LSHSelfAttention(WIDTH, HEADS, HEAD_SIZE, chunk=CHUNK, hashes=rounds, seq=seq)
        names = ("query_key", "value")
    else:
        layer = LocalSelfAttention(WIDTH, HEADS, HEAD_SIZE, chunk=CHUNK, before=1, after=0, causal=True)
        names = ("query", "key", "value")
    with torch.no_grad():
        for name in names:
            getattr(layer, name).linear.weight.copy_(getattr(peer.attention, name).weight)
        layer.out.linear.weight.copy_(peer.output.dense.weight)
        if rounds:
            share_rotations(layer, seq)
    return layer


def share_rotations(layer: nn.Module, seq: int) -> None:
    """Those that the peer draws in every pass: as many columns as the buckets of this length need."""
    columns = sum(bucket_factors(seq, CHUNK)) // 2
    torch.manual_seed(SEED)
    leading = layer.rotations[..., :columns]
    leading.copy_(torch.randn(leading.shape, dtype=leading.dtype))


def pair(kind: str, seq: int) -> Dict[str, nn.Module]:
    """{"ours": …, "theirs": …} of a kind."""
    peer = theirs(KINDS[kind], seq)
    return {"ours": ours(KINDS[kind], seq, peer), "theirs": peer}


def full() -> nn.Module:
    """Full causal attention of the same size, fused."""
    torch.manual_seed(0)
    return CausalSelfAttention(WIDTH, HEADS, bias=False, implementation="fused")


def inputs(seq: int, dtype: torch.dtype = torch.float32) -> Tuple[torch.Tensor, torch.Tensor]:
    """x `[1, seq, width]` that wants a gradient, and the gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    x, seed = (torch.randn(1, seq, WIDTH, generator=generator) for _ in range(2))
    return x.to(dtype).requires_grad_(), seed.to(dtype)


def step_of(layer: nn.Module, seq: int) -> Step:
    """Forward and backward: gradients of the input and of all weights."""
    x, seed = inputs(seq)

    def step() -> None:
        x.grad = None
        layer(x).backward(seed)

    return step


def difference(kind: str, seq: int) -> float:
    """The largest difference of outputs and gradients between ours and theirs in float64, relative to the largest number."""
    found: List[List[torch.Tensor]] = []
    layers = pair(kind, seq)
    for layer in (layers["ours"], layers["theirs"]):
        layer.double()
        x, seed = inputs(seq, torch.float64)
        if hasattr(layer, "rotations"):  # converted modules draw theirs anew
            share_rotations(layer, seq)
        out = layer(x)
        found.append([out.detach(), *torch.autograd.grad(out, [x, *_weights(layer)], seed)])
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(*found))


def _weights(layer: nn.Module) -> List[torch.Tensor]:
    """In the order that both kinds of layer have: the projections, then the output's."""
    named = {name.replace(".linear", ""): weight for name, weight in layer.named_parameters()}
    order = ("query_key", "query", "key", "value", "out", "dense")
    return [weight for key in order for name, weight in named.items() if name.split(".")[-2] == key]
