"""Attention, and the cache that generation uses."""

from __future__ import annotations

from ipu_lean.nn.attention.cache import KVCache
from ipu_lean.nn.attention.full import IMPLEMENTATIONS, MASKED, CausalSelfAttention, combined_mask

__all__ = ["IMPLEMENTATIONS", "MASKED", "CausalSelfAttention", "KVCache", "combined_mask"]
