"""Attention, and the cache that generation uses."""

from __future__ import annotations

from ipu_lean.nn.attention.blockwise import MASKED
from ipu_lean.nn.attention.cache import KVCache
from ipu_lean.nn.attention.full import IMPLEMENTATIONS, CausalSelfAttention, combined_mask
from ipu_lean.nn.attention.local import LocalSelfAttention
from ipu_lean.nn.attention.lsh import LSHSelfAttention

__all__ = [
    "IMPLEMENTATIONS",
    "MASKED",
    "CausalSelfAttention",
    "KVCache",
    "LSHSelfAttention",
    "LocalSelfAttention",
    "combined_mask",
]
