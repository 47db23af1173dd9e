"""Byte-level BPE (GPT-2) by the library `tokenizers`: trained here, or loaded from its JSON or from GPT-2's pair of files."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable, List, Optional, Sequence, Tuple

import numpy as np

from ipu_lean.data.pieces import Piece, cut_pieces
from ipu_lean.data.tokenizers.base import Tokenizer, too_small
from ipu_lean.errors import ConfigError, EnvironmentProblem

MODEL = "bpe.json"
END = "<|endoftext|>"
SHORT = 1 << 12
"""Characters handed to the library at a time."""
ENDS = (END, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
"""Names under which loaded tokenizers keep their end-of-text token, by preference."""


def library() -> Any:
    """The package tokenizers, imported when first needed."""
    try:
        import tokenizers
    except ImportError as error:
        raise EnvironmentProblem("A BPE tokenizer needs the package tokenizers: `pip install tokenizers`.") from error
    return tokenizers


class BpeTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`, from its JSON.

    The name of a special token that occurs in a text is read as text, and no special tokens are added.
    """

    kind = "bpe"

    def __init__(self, text: str, origin: str = "the tokenizer") -> None:
        try:
            self._model = library().Tokenizer.from_str(text)
        except EnvironmentProblem:
            raise
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(
                f"{origin} is not a tokenizer of the library `tokenizers`: {error}", key="data.tokenizer.path"
            ) from error
        self._text = text
        self._model.encode_special_tokens = True
        self._model.no_truncation()
        self._model.no_padding()
        ids = self._model.get_vocab(with_added_tokens=True)
        self.vocab = max(ids.values()) + 1
        self.end: Optional[int] = next((ids[name] for name in ENDS if name in ids), None)

    def encode(self, text: str) -> List[int]:
        return self._model.encode(text, add_special_tokens=False).ids

    def id_of(self, piece: str) -> Optional[int]:
        return self._model.token_to_id(piece)

    def encode_texts(self, texts: Sequence[str]) -> List[np.ndarray]:
        encode = getattr(self._model, "encode_batch_fast", self._model.encode_batch)  # fast: ids without their places in the text
        return [np.asarray(found.ids, dtype=np.int64) for found in encode(list(texts), add_special_tokens=False)]

    def encode_pieces(self, pieces: Sequence[Piece]) -> List[np.ndarray]:
        """As for every tokenizer; but this library's time for a text grows faster than its length, so pieces are cut further."""
        parts = [
            [part._replace(first=part.first and piece.first) for part in cut_pieces([(piece.text, True)], SHORT)]
            for piece in pieces
        ]
        rows = iter(super().encode_pieces([part for piece in parts for part in piece]))
        return [np.concatenate([next(rows) for _ in piece]) for piece in parts]

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode([int(i) for i in ids if 0 <= i < self.vocab and i != self.end], skip_special_tokens=True)

    def model_file(self) -> Tuple[str, bytes]:
        return MODEL, self._text.encode("utf-8")


def train_bpe(texts: Iterable[str], vocab: int) -> BpeTokenizer:
    """Train byte-level BPE on `texts`: id 0 ends a document, then the 256 bytes, then merges. Every text is encoded without loss.

    Args:
        vocab: number of ids, at least 257. Few texts may not hold that many different pairs; then there are fewer.
    """
    if vocab < 257:
        raise too_small(vocab, 257, "256 bytes and the end of text have ids of their own")
    lib = library()
    model = lib.Tokenizer(lib.models.BPE())
    model.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = lib.decoders.ByteLevel()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END],
        initial_alphabet=sorted(lib.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return BpeTokenizer(model.to_str())


def from_vocab_and_merges(folder: Path) -> BpeTokenizer:
    """GPT-2's older pair of files, with its end-of-text token if the vocabulary has one."""
    lib = library()
    try:
        model = lib.Tokenizer(lib.models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(
            f"{folder} does not hold a readable vocab.json and merges.txt: {error}", key="data.tokenizer.path"
        ) from error
    model.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = lib.decoders.ByteLevel()
    if model.token_to_id(END) is not None:
        model.add_special_tokens([END])
    return BpeTokenizer(model.to_str(), str(folder))
