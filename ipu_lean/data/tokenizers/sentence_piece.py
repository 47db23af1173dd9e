"""SentencePiece (Kudo and Richardson 2018): BPE over characters, trained here or loaded from a `.model` file."""
from __future__ import annotations

import io
import re
from typing import Any, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from ipu_lean.data.tokenizers.base import Tokenizer, processors, too_small
from ipu_lean.errors import ConfigError, EnvironmentProblem

MODEL = "sentencepiece.model"
LONGEST_SENTENCE = 4096
"""Characters in one training sentence; longer lines are cut at blanks, where no piece reaches across."""


def library() -> Any:
    """The package sentencepiece, imported when first needed."""
    try:
        import sentencepiece
    except ImportError as error:
        raise EnvironmentProblem(
            "A SentencePiece tokenizer needs the package sentencepiece: `pip install sentencepiece`."
        ) from error
    return sentencepiece


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, from its serialised form.

    Models trained here keep blanks and line ends as they are, so that decoding gives back every text whose characters they know.
    A loaded model does what it was trained to do (many join blanks and drop line ends).
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, origin: str = "the SentencePiece model") -> None:
        try:
            if not model:
                raise RuntimeError("empty")  # the library would take it for no model given, and crash on the first text
            self._model = library().SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError) as error:
            raise ConfigError(f"{origin} is not a SentencePiece model", key="data.tokenizer.path") from error
        self._bytes = model
        self.vocab = self._model.get_piece_size()
        end = self._model.eos_id()
        self.end: Optional[int] = end if end >= 0 else None

    def encode(self, text: str) -> List[int]:
        return self._model.encode(text)

    def id_of(self, piece: str) -> Optional[int]:
        found = self._model.piece_to_id(piece)  # of a name that is no piece: the unknown piece's
        return found if self._model.id_to_piece(found) == piece else None

    def encode_texts(self, texts: Sequence[str]) -> List[np.ndarray]:
        return [np.asarray(row, dtype=np.int64) for row in self._model.encode(list(texts), num_threads=processors())]

    def decode(self, ids: Iterable[int]) -> str:
        return self._model.decode([int(i) for i in ids if 0 <= i < self.vocab and i != self.end])

    def model_file(self) -> Tuple[str, bytes]:
        return MODEL, self._bytes


def train_sentencepiece(
    texts: Iterable[str], vocab: int, coverage: float = 1.0, byte_fallback: bool = False
) -> SentencePieceTokenizer:
    """Train BPE pieces on `texts`; the same texts give the same model, byte for byte, under one release of the library.

    Piece 0 is the unknown piece, 1 ends a document, 2 is the line end (which the library would otherwise turn into a blank).

    Args:
        vocab: number of pieces. Few texts may not hold that many different pairs; then there are fewer.
        coverage: share of the characters that get pieces of their own; the rest becomes the unknown piece.
        byte_fallback: spell unknown characters as bytes, which takes 256 pieces.

    Raises:
        ConfigError: the characters alone need more pieces than `vocab`.
        EnvironmentProblem: sentencepiece is not installed.
    """
    if byte_fallback and vocab < 256 + 4:
        raise too_small(vocab, 256 + 4, "spelling unknown characters as bytes takes 256 pieces")
    written = io.BytesIO()
    try:
        library().SentencePieceTrainer.train(
            sentence_iterator=sentences(texts),
            model_writer=written,
            model_type="bpe",
            vocab_size=vocab,
            character_coverage=coverage,
            byte_fallback=byte_fallback,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            user_defined_symbols=["\n"],
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            max_sentence_length=8 * LONGEST_SENTENCE,
            hard_vocab_limit=False,
            num_threads=1,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        least = re.search(r"smaller than required_chars\. \d+ vs (\d+)", str(error))
        if least:
            raise too_small(vocab, int(least.group(1)), "this text's characters alone take more") from error
        raise ConfigError(f"SentencePiece cannot be trained on this text: {str(error).strip()}", key="data.tokenizer") from error
    return SentencePieceTokenizer(written.getvalue())


def sentences(texts: Iterable[str]) -> Iterator[str]:
    """The texts' lines without their ends, long ones cut at blanks, empty ones and NUL characters left out."""
    for text in texts:
        for line in text.replace("\0", "").split("\n"):
            while len(line) > LONGEST_SENTENCE:
                cut = line.rfind(" ", 1, LONGEST_SENTENCE)
                cut = cut if cut > 0 else LONGEST_SENTENCE
                yield line[:cut]
                line = line[cut:]
            if line:
                yield line
