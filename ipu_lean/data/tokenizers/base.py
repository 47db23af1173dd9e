"""What the rest of the program knows of a tokenizer, and the folder that one is saved as."""
from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple, Union

import numpy as np

from ipu_lean.data.pieces import Piece
from ipu_lean.errors import ConfigError

MANIFEST = "tokenizer.json"
SCHEMA = 1
LETTER = "a"


class Tokenizer:
    """Text to ids and back.

    Attributes:
        kind: `bytes`, `sentencepiece` or `bpe`.
        vocab: ids are 0 .. vocab - 1.
        end: the id that ends a document, or None if the tokenizer has no such thing.
    """

    kind: str = ""
    vocab: int = 0
    end: Optional[int] = None

    def encode(self, text: str) -> List[int]:
        """The ids of `text`, without an end-of-text id."""
        raise NotImplementedError

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. The end-of-text id and ids beyond the vocabulary (a model's padding) give nothing."""
        raise NotImplementedError

    def id_of(self, piece: str) -> Optional[int]:
        """The id of the piece (or special token) of that name, if there is one."""
        return None

    def encode_texts(self, texts: Sequence[str]) -> List[np.ndarray]:
        """The ids of several texts, each on its own."""
        return [np.asarray(self.encode(text), dtype=np.int64) for text in texts]

    def encode_pieces(self, pieces: Sequence[Piece]) -> List[np.ndarray]:
        """The ids of each piece, so that a document's pieces in a row are the document's ids.

        Many tokenizers double or drop the blank at the beginning of a text. A later piece begins with a blank that is to stay, so
        it is encoded behind a letter, whose ids are then taken off.
        """
        behind = [not piece.first and piece.text[0] == " " for piece in pieces]
        rows = self.encode_texts([LETTER + piece.text if later else piece.text for piece, later in zip(pieces, behind)])
        skip = len(self.encode(LETTER))
        return [row[skip:] if later else row for row, later in zip(rows, behind)]

    def model_file(self) -> Optional[Tuple[str, bytes]]:
        """(file name, content) of what was trained, or None if nothing was."""
        return None

    def describe(self) -> Dict[str, Any]:
        """Plain data that tells this tokenizer from every other one."""
        model = self.model_file()
        return {
            "schema": SCHEMA,
            "kind": self.kind,
            "vocab": self.vocab,
            "end": self.end,
            "file": model[0] if model else None,
            "sha256": hashlib.sha256(model[1]).hexdigest() if model else None,
        }

    def save(self, folder: Union[str, Path]) -> None:
        """Write `tokenizer.json` (and the model file, if there is one) into `folder`, which is made if need be."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        model = self.model_file()
        if model:
            (place / model[0]).write_bytes(model[1])
        (place / MANIFEST).write_text(json.dumps(self.describe(), indent=2) + "\n", encoding="utf-8")


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def too_small(vocab: int, least: int, why: str) -> ConfigError:
    """The error for a vocabulary that the kind cannot have."""
    return ConfigError(
        f"{why}, so at least {least:,} pieces are needed",
        key="data.tokenizer.vocab",
        value=vocab,
        suggestion=f"set it to {least} or more",
    )
