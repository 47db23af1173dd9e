"""Attention, and the cache that generation uses."""

from __future__ import annotations

from ipu_lean.nn.attention.blockwise import MASKED
from ipu_lean.nn.attention.cache import KVCache
from ipu_lean.nn.attention.full import IMPLEMENTATIONS, CausalSelfAttention, combined_mask

__all__ = ["IMPLEMENTATIONS", "MASKED", "CausalSelfAttention", "KVCache", "combined_mask"]
