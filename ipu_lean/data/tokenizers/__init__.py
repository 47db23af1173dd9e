"""Tokenizers: the bytes of UTF-8, SentencePiece, byte-level BPE. Optional packages are imported when a tokenizer needs them."""
from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Dict, Iterable, Union

from ipu_lean.data.tokenizers import bpe, sentence_piece
from ipu_lean.data.tokenizers.base import MANIFEST, SCHEMA, Tokenizer
from ipu_lean.data.tokenizers.bpe import BpeTokenizer, from_vocab_and_merges, train_bpe
from ipu_lean.data.tokenizers.byte_level import ByteTokenizer
from ipu_lean.data.tokenizers.sentence_piece import SentencePieceTokenizer, train_sentencepiece
from ipu_lean.errors import ConfigError

__all__ = [
    "BpeTokenizer",
    "ByteTokenizer",
    "SentencePieceTokenizer",
    "Tokenizer",
    "load_tokenizer",
    "require_trainer",
    "train_bpe",
    "train_sentencepiece",
    "train_tokenizer",
]

KEY = "data.tokenizer.path"


def require_trainer(kind: str) -> None:
    """EnvironmentProblem if the package that trains such a tokenizer is missing; ask before reading a long corpus."""
    (bpe if kind == "bpe" else sentence_piece).library()


def train_tokenizer(kind: str, texts: Iterable[str], vocab: int, coverage: float = 1.0) -> Tokenizer:
    """Train a tokenizer of a kind that is trained (`sentencepiece` or `bpe`) on an iterable of texts."""
    assert kind in ("sentencepiece", "bpe"), kind
    return train_bpe(texts, vocab) if kind == "bpe" else train_sentencepiece(texts, vocab, coverage)


def load_tokenizer(path: Union[str, Path]) -> Tokenizer:
    """Load a tokenizer from a folder that `Tokenizer.save` wrote, or from another program's files.

    Also taken: a SentencePiece `.model`; a `tokenizer.json` of the library `tokenizers`; a folder with either, or with
    `vocab.json` and `merges.txt`.

    Raises:
        ConfigError: nothing there, not a tokenizer, or damaged.
        EnvironmentProblem: the package that it needs is not installed.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        return _from_folder(place)
    if not place.is_file():
        raise ConfigError("there is no such file or folder", key=KEY, value=str(path))
    if place.suffix == ".json":
        return _from_json(place)
    if place.suffix == ".model":
        return SentencePieceTokenizer(place.read_bytes(), str(place))
    raise ConfigError("the file is neither a SentencePiece .model nor a tokenizer.json", key=KEY, value=str(path))


def _from_folder(folder: Path) -> Tokenizer:
    if (folder / MANIFEST).is_file():
        return _from_json(folder / MANIFEST)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return from_vocab_and_merges(folder)
    models = sorted(folder.glob("*.model"))
    if len(models) == 1:
        return SentencePieceTokenizer(models[0].read_bytes(), str(models[0]))
    raise ConfigError(
        "the folder holds no tokenizer.json, no vocab.json with merges.txt, and not one .model file", key=KEY, value=str(folder)
    )


def _from_json(path: Path) -> Tokenizer:
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", key=KEY) from error
    if isinstance(found, dict) and "schema" in found and "kind" in found:
        return _from_manifest(path, found)
    if isinstance(found, dict) and "model" in found:
        return BpeTokenizer(text, str(path))
    raise ConfigError("the file is neither a tokenizer of ours nor one of the library `tokenizers`", key=KEY, value=str(path))


def _from_manifest(path: Path, found: Dict[str, Any]) -> Tokenizer:
    if found["schema"] != SCHEMA or found["kind"] not in ("bytes", "sentencepiece", "bpe"):
        raise ConfigError(f"{path} was written by another release (schema {found['schema']!r}, kind {found['kind']!r})", key=KEY)
    if found["kind"] == "bytes":
        return ByteTokenizer()
    model = path.parent / str(found.get("file"))
    try:
        content = model.read_bytes()
    except OSError as error:
        raise ConfigError(f"{model}, which {path} names, cannot be read: {error.strerror}", key=KEY) from error
    if hashlib.sha256(content).hexdigest() != found.get("sha256"):
        raise ConfigError(f"{model} is damaged: its checksum is not the one in {path}", key=KEY)
    if found["kind"] == "bpe":
        return BpeTokenizer(content.decode("utf-8"), str(model))
    return SentencePieceTokenizer(content, str(model))
