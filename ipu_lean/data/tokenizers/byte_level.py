"""The tokenizer that needs no training: the bytes of UTF-8."""
from __future__ import annotations

from typing import Iterable, List, Sequence

import numpy as np

from ipu_lean.data.pieces import Piece
from ipu_lean.data.tokenizers.base import Tokenizer

END = 256


class ByteTokenizer(Tokenizer):
    """Ids 0 .. 255 are bytes, 256 ends a document. Every text is encoded without loss."""

    kind = "bytes"
    vocab = 257
    end = END

    def encode(self, text: str) -> List[int]:
        return list(text.encode("utf-8"))

    def encode_pieces(self, pieces: Sequence[Piece]) -> List[np.ndarray]:
        return [np.frombuffer(piece.text.encode("utf-8"), dtype=np.uint8) for piece in pieces]

    def decode(self, ids: Iterable[int]) -> str:
        """Bytes that are no UTF-8 (a model may make them, or the ids may begin within a character) become U+FFFD."""
        return bytes(int(number) for number in ids if 0 <= number < END).decode("utf-8", errors="replace")
