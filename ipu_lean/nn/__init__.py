"""The parts that models are built from. Each initialises itself by muP's rules and says so in `init_stds`."""

from __future__ import annotations

from ipu_lean.nn.activations import ACTIVATIONS, GATED, gelu
from ipu_lean.nn.attention import CausalSelfAttention, KVCache, LocalSelfAttention, LSHSelfAttention
from ipu_lean.nn.embedding import Embedding
from ipu_lean.nn.fc import FCLayer
from ipu_lean.nn.ffn import FeedForward
from ipu_lean.nn.linear import Linear
from ipu_lean.nn.loss import IGNORED, automatic_chunk, chunked_cross_entropy
from ipu_lean.nn.norms import LayerNorm, RMSNorm, make_norm
from ipu_lean.nn.positions import AxialPositions, LearnedPositions, Rotary, SinusoidalPositions
from ipu_lean.nn.readout import PopReadout, TiedReadout

__all__ = [
    "ACTIVATIONS",
    "GATED",
    "IGNORED",
    "AxialPositions",
    "CausalSelfAttention",
    "Embedding",
    "FCLayer",
    "FeedForward",
    "KVCache",
    "LSHSelfAttention",
    "LayerNorm",
    "LearnedPositions",
    "Linear",
    "LocalSelfAttention",
    "PopReadout",
    "RMSNorm",
    "Rotary",
    "SinusoidalPositions",
    "TiedReadout",
    "automatic_chunk",
    "chunked_cross_entropy",
    "gelu",
    "make_norm",
]
