"""Bytes."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_lean.data.pieces import cut_pieces
from ipu_lean.data.tokenizers import ByteTokenizer, load_tokenizer

pytestmark = pytest.mark.pod


@given(st.text())
def test_ids_are_utf8_and_back(text):
    tokenizer = ByteTokenizer()
    assert bytes(tokenizer.encode(text)) == text.encode("utf-8")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([256, *tokenizer.encode(text), 256, 257, 300, -1]) == text


@given(st.text(), st.integers(1, 9))
def test_pieces_in_a_row_are_the_text(text, size):
    found = ByteTokenizer().encode_pieces(list(cut_pieces([(text, True)], size)))
    assert b"".join(np.asarray(ids, dtype=np.uint8).tobytes() for ids in found) == text.encode("utf-8")


def test_bytes_that_are_no_text_are_shown_as_such():
    assert ByteTokenizer().decode([0xC3]) == "\ufffd"
    assert ByteTokenizer().decode(np.array([0xA9, 65], dtype=np.int32)) == "\ufffdA"


def test_save_and_load(tmp_path):
    ByteTokenizer().save(tmp_path / "new" / "place")
    found = load_tokenizer(tmp_path / "new" / "place")
    assert (found.kind, found.vocab, found.end) == ("bytes", 257, 256)
    assert found.describe() == ByteTokenizer().describe()
