"""The part of a corpus that a tokenizer is trained on."""
from __future__ import annotations

import math
from typing import Callable, Iterable, List, Tuple

import numpy as np

from ipu_lean.data.pieces import PIECE, Piece

SAMPLE_BLOCKS = 256
"""Blocks kept at most: 16 million characters together."""


def sample_texts(
    pieces: Iterable[Piece],
    held_out: float = 0.0,
    *,
    blocks: int = SAMPLE_BLOCKS,
    block: int = PIECE,
    read: Callable[[], None] = lambda: None,
) -> List[str]:
    """An even, bounded, repeatable sample of a corpus in one reading: the whole of a small one, random blocks of a large one.

    The pieces are gathered into blocks of `block` characters, and `blocks` of them are kept by reservoir sampling (Vitter 1985,
    algorithm R) under a fixed seed. The last `held_out` share of the corpus, which becomes validation sets, is left out.

    Args:
        read: called after each block that was read.
    """
    rng = np.random.RandomState(0)
    kept: List[Tuple[int, List[str]]] = []
    texts: List[str] = []
    begin = total = seen = 0

    def close_block() -> None:
        nonlocal texts, begin, seen
        slot = seen if seen < blocks else int(rng.randint(0, seen + 1))
        if slot == len(kept):
            kept.append((begin, texts))
        elif slot < blocks:
            kept[slot] = (begin, texts)
        texts, begin, seen = [], total, seen + 1
        read()

    for piece in pieces:
        texts.append(piece.text)
        total += len(piece.text)
        if total - begin >= block:
            close_block()
    if texts:
        close_block()
    end = total - math.ceil(held_out * total)
    return [text for start, members in sorted(kept) for text in up_to(members, end - start)]


def up_to(texts: List[str], characters: int) -> List[str]:
    """The first `characters` characters of a row of texts."""
    found = []
    for text in texts:
        if characters <= 0:
            break
        found.append(text[:characters])
        characters -= len(text)
    return found
