"""Pieces: no character lost, none over the bound, cuts that the reader's block length cannot move."""
from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ipu_lean.data.pieces import Piece, cut_pieces

pytestmark = pytest.mark.pod

TEXT = st.text(alphabet="ab \n\t\u00a0é", max_size=60)


def fragmented(document: str, length: int):
    parts = [document[i : i + length] for i in range(0, len(document), length)]
    return [(part, number == len(parts) - 1) for number, part in enumerate(parts)]


@given(st.lists(TEXT, max_size=5), st.integers(1, 12), st.integers(1, 70))
def test_documents_are_whole_whatever_the_fragments(documents, size, length):
    fragments = [fragment for document in documents for fragment in fragmented(document, length)]
    pieces = list(cut_pieces(fragments, size))
    joined, current = [], ""
    for piece in pieces:
        assert piece.first == (current == "")
        assert 0 < len(piece.text) <= size
        current += piece.text
        if piece.last:
            joined.append(current)
            current = ""
    assert current == "" and joined == [document for document in documents if document]
    assert pieces == list(cut_pieces([(document, True) for document in documents if document], size))


@given(TEXT, st.integers(1, 12))
@example("a b c", 3)
@example("a b  c", 4)
def test_cuts_lie_before_a_blank_after_a_visible_character_if_there_is_one(document, size):
    place = 0
    for piece in cut_pieces([(document, True)] if document else [], size):
        end = place + len(piece.text)
        good = [i for i in range(place + 1, place + size + 1) if document[i : i + 1] == " " and not document[i - 1].isspace()]
        if not piece.last:
            assert end == (good[-1] if good else place + size)
        place = end
    assert place == len(document)


def test_a_stream_that_stops_within_a_document_ends_it():
    assert list(cut_pieces([("abc", False)], 10)) == [Piece("abc", True, True)]
    assert list(cut_pieces([("", True), ("", True)], 10)) == []
