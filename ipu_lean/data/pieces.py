"""Long documents are cut into pieces before they are encoded, so that memory stays bounded whatever a document's length.

A cut may not change the tokens. Byte-level BPE and SentencePiece, as they are usually trained, both begin a token at a blank
that follows a visible character: no merge reaches across it. So a piece ends before such a blank, and the pieces' tokens in a
row are the document's. Only where PIECE characters hold no such place (text without blanks) is the cut made anyway; there two
tokens may stand for one.
"""
from __future__ import annotations

from typing import Iterable, Iterator, NamedTuple

from ipu_lean.data.sources import Fragment

PIECE = 1 << 16
"""Longest piece, in characters."""


class Piece(NamedTuple):
    """A part of a document, with whether it begins and whether it ends it."""

    text: str
    first: bool
    last: bool


def cut_pieces(fragments: Iterable[Fragment], size: int = PIECE) -> Iterator[Piece]:
    """Regroup fragments into pieces of at most `size` characters, cut where the text alone says. Empty documents vanish."""
    buffer, first = "", True
    for text, ends in fragments:
        buffer += text
        start = 0
        while len(buffer) - start > size:
            stop = cut_place(buffer, start, start + size)
            yield Piece(buffer[start:stop], first, False)
            start, first = stop, False
        buffer = buffer[start:]
        if ends:
            if buffer:
                yield Piece(buffer, first, True)
            buffer, first = "", True
    if buffer:
        yield Piece(buffer, first, True)


def cut_place(text: str, start: int, stop: int) -> int:
    """The last place in (start, stop] with a blank after a visible character; `stop` if there is none. Needs len(text) > stop."""
    place = text.rfind(" ", start + 1, stop + 1)
    while place > start:
        if not text[place - 1].isspace():
            return place
        place = text.rfind(" ", start + 1, place)
    return stop
