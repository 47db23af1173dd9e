"""The text a tokenizer is trained on: everything of a small corpus, a bounded and even part of a large one, nothing held out."""
from __future__ import annotations

import pytest

from ipu_lean.data.pieces import cut_pieces
from ipu_lean.data.sample import sample_texts
from tests.data.helpers import prose

pytestmark = pytest.mark.pod


def pieces(documents, size=50):
    return cut_pieces([(document, True) for document in documents], size)


def test_a_small_corpus_is_taken_whole():
    documents = [prose(400, seed) for seed in range(5)]
    assert "".join(sample_texts(pieces(documents))) == "".join(documents)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.999])
def test_the_held_out_end_is_left_out_to_the_character(share):
    documents = [prose(333, seed) for seed in range(5)]
    text = "".join(documents)
    found = "".join(sample_texts(pieces(documents), share, block=64))
    assert found == text[: len(found)]
    assert len(text) - len(found) - 1 < share * len(text) <= len(text) - len(found)


def test_a_large_corpus_gives_an_even_bounded_repeatable_part():
    documents = [f"{number:07d} " * 8 for number in range(4000)]
    found = sample_texts(pieces(documents, 64), 0.25, blocks=200, block=128)
    numbers = [int(text[:7]) for text in found]
    assert found == sample_texts(pieces(documents, 64), 0.25, blocks=200, block=128)
    assert numbers == sorted(numbers) and max(numbers) < 3000
    assert 250 < len(numbers) < 350  # 200 blocks of two documents, of which a quarter falls away
    thirds = [sum(low <= number < low + 1000 for number in numbers) for low in (0, 1000, 2000)]
    assert min(thirds) > 60


def test_short_documents_are_sampled_in_blocks():
    found = sample_texts(pieces(["abcd "] * 1000), blocks=10, block=100)
    assert sum(map(len, found)) == 10 * 100
