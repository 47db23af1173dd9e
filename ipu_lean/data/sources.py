"""What a corpus is to the rest of the room: a named stream of text with a fingerprint.

A source is read as a stream of `(text, ends_document)` fragments of bounded length, in an order that never changes. How long the
fragments are is the reader's affair: nothing downstream depends on it (see pieces.py).
"""
from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, Optional, Tuple

from ipu_lean.errors import ConfigError

Fragment = Tuple[str, bool]

BLOCK = 1 << 20
"""Bytes read from a file at a time, and the longest string (in characters) that a source yields from memory."""


class Source:
    """One corpus.

    Args:
        spec: the corpus as the user wrote it (`kjv`, `notes/*.md`, ...).
        name: a short word for folder names and messages.
        identity: plain data that changes when the text changes (paths with sizes and times, or a checksum).
        read: called with the source for each reading; yields fragments and may add to `source.consumed`.
        size: bytes to be read, if known beforehand; a progress bar's end.
        limit: stop after this many characters.
        sample: for training a tokenizer read only this many characters from the beginning; None for all.
        refresh: computes `identity` anew, to notice a corpus that changed while it was read.
    """

    def __init__(
        self,
        spec: str,
        name: str,
        identity: Dict[str, Any],
        read: Callable[[Source], Iterable[Fragment]],
        *,
        size: Optional[int] = None,
        limit: Optional[int] = None,
        sample: Optional[int] = None,
        refresh: Optional[Callable[[], Dict[str, Any]]] = None,
    ) -> None:
        self.spec, self.name, self.identity, self.size, self.limit, self.sample = spec, name, identity, size, limit, sample
        self.consumed = 0
        """Bytes of the source read so far in the present reading."""
        self._read, self._refresh = read, refresh

    def fragments(self, sampling: bool = False) -> Iterator[Fragment]:
        """Read the corpus from its beginning: `(text, ends_document)`, at most `limit` characters in all.

        Args:
            sampling: read for training a tokenizer, so at most `sample` characters.
        """
        self.consumed = 0
        bounds = [self.limit, self.sample if sampling else None]
        left = min((bound for bound in bounds if bound is not None), default=None)
        for text, ends in self._read(self):
            if left is None:
                yield text, ends
                continue
            yield text[:left], ends or len(text) >= left
            left -= len(text)
            if left <= 0:
                return

    def changed(self) -> bool:
        """True if the text is no longer what it was when the source was opened."""
        try:
            return self._refresh is not None and self._refresh() != self.identity
        except OSError:
            return True


def in_memory(documents: Iterable[str]) -> Callable[[Source], Iterator[Fragment]]:
    """A reader over whole documents, given as a re-iterable (a list, or an object with `__iter__`)."""

    def read(source: Source) -> Iterator[Fragment]:
        for document in documents:
            yield from split_document(document)
            source.consumed += len(document)

    return read


def split_document(document: str) -> Iterator[Fragment]:
    """A document held as one string, in fragments of at most BLOCK characters; nothing for an empty one."""
    for start in range(0, len(document), BLOCK):
        yield document[start : start + BLOCK], start + BLOCK >= len(document)


def sound_text(text: str) -> str:
    """`text` with unpaired surrogates, which JSON can spell and UTF-8 cannot, replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's content, read block by block."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(BLOCK), b""):
            digest.update(block)
    return digest.hexdigest()


def corpus_error(rule: str, source: Source, key: str, suggestion: Optional[str] = None) -> ConfigError:
    """A ConfigError about `source`, pointing at the key that named it."""
    return ConfigError(rule, key=key, value=source.spec, suggestion=suggestion)
