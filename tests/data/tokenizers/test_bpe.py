"""Byte-level BPE, trained here and loaded."""
from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_lean.data.pieces import cut_pieces
from ipu_lean.data.tokenizers import bpe, load_tokenizer, train_bpe
from ipu_lean.errors import ConfigError, EnvironmentProblem
from tests.data.helpers import ROOT, prose, python

tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.pod

TEXT = prose(20000)


@pytest.fixture(scope="module")
def trained():
    return train_bpe([TEXT], 400)


def test_vocabulary_and_end(trained):
    assert (trained.kind, trained.vocab, trained.end) == ("bpe", 400, 0)
    assert len(trained.encode(TEXT)) < 0.6 * len(TEXT)


@given(st.text())
def test_every_text_comes_back_exactly(trained, text):
    assert trained.decode(trained.encode(text)) == text
    assert trained.decode([0, *trained.encode(text), 400, 100000]) == text


def test_the_name_of_the_end_token_within_a_text_is_text(trained):
    text = "a <|endoftext|> b"
    assert 0 not in trained.encode(text)
    assert 0 not in np.concatenate(trained.encode_pieces(list(cut_pieces([(text, True)]))))
    assert trained.decode(trained.encode(text)) == text


@pytest.mark.parametrize("size", [20, 100, 3000, 20000])
@pytest.mark.parametrize("short", [10, 4096])
def test_pieces_in_a_row_are_the_text(trained, size, short, monkeypatch):
    monkeypatch.setattr(bpe, "SHORT", max(short, max(map(len, TEXT.split(" "))) + 2))
    size = max(size, max(map(len, TEXT.split(" "))) + 2)
    assert np.concatenate(trained.encode_pieces(list(cut_pieces([(TEXT, True)], size)))).tolist() == trained.encode(TEXT)


def test_a_tokenizer_that_begins_every_text_with_a_blank(tmp_path):
    """The kind that is converted from SentencePiece: a blank is a letter, and one is put before the text."""
    lib = tokenizers.Tokenizer(tokenizers.models.BPE())
    lib.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    lib.train_from_iterator(TEXT.split(" "), tokenizers.trainers.BpeTrainer(vocab_size=300, show_progress=False))
    lib.save(str(tmp_path / "tokenizer.json"))
    found = load_tokenizer(tmp_path)
    pieces = list(cut_pieces([(TEXT[:3000], True)], 100))
    assert len(pieces) > 10
    assert np.concatenate(found.encode_pieces(pieces)).tolist() == found.encode(TEXT[:3000])


@given(st.lists(st.sampled_from(["a", "é", "'s", "12", " ", "  ", "\n", "\t", "\u00a0", "\u3000", "...", "\r\n"]), max_size=40))
def test_no_cut_changes_the_tokens_of_awkward_blanks(trained, parts):
    text = "".join(parts)
    for size in (4, 7, 11):
        pieces = list(cut_pieces([(text, True)], size)) if text else []
        clean = all(later.text[0] == " " and not earlier.text[-1].isspace() for earlier, later in zip(pieces, pieces[1:]))
        if pieces and clean:
            assert np.concatenate(trained.encode_pieces(pieces)).tolist() == trained.encode(text)


def test_training_repeats_in_other_processes_whatever_their_threads(trained):
    code = (
        "import sys\nfrom tests.data.helpers import prose\nfrom ipu_lean.data.tokenizers import train_bpe\n"
        "print(train_bpe([prose(20000)], 400).describe()['sha256'])"
    )
    for threads in ("1", "4"):
        out, err = python(code, ROOT, {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}).communicate(timeout=60)
        assert out.strip() == trained.describe()["sha256"], err


def test_save_and_load(trained, tmp_path):
    trained.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.describe() == trained.describe() and again.encode(TEXT) == trained.encode(TEXT)
    (tmp_path / "other").mkdir()
    theirs = tmp_path / "other" / "tokenizer.json"
    tokenizers.Tokenizer.from_file(str(tmp_path / "bpe.json")).save(str(theirs))
    for place in (theirs, theirs.parent):
        assert load_tokenizer(place).encode(TEXT) == trained.encode(TEXT)


def test_gpt2_s_pair_of_files(trained, tmp_path):
    content = json.loads(trained.model_file()[1])
    (tmp_path / "vocab.json").write_text(json.dumps(content["model"]["vocab"]), encoding="utf-8")
    merges = [m if isinstance(m, str) else " ".join(m) for m in content["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    found = load_tokenizer(tmp_path)
    assert (found.vocab, found.end) == (400, 0)
    assert found.encode(TEXT) == trained.encode(TEXT)
    assert found.decode(found.encode(TEXT)) == TEXT
    (tmp_path / "merges.txt").write_text("no merges", encoding="utf-8")
    with pytest.raises(ConfigError, match="readable vocab.json and merges.txt"):
        load_tokenizer(tmp_path)


def test_a_loaded_tokenizer_adds_nothing_and_cuts_nothing(trained, tmp_path):
    lib = tokenizers.Tokenizer.from_str(trained.model_file()[1].decode("utf-8"))
    lib.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    lib.enable_truncation(16)
    lib.enable_padding(length=32)
    lib.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(TEXT) == trained.encode(TEXT)


def test_end_of_text_is_found_under_its_other_names(trained, tmp_path):
    lib = tokenizers.Tokenizer.from_str(trained.model_file()[1].decode("utf-8").replace("<|endoftext|>", "<eos>"))
    lib.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).end == 0
    lib = tokenizers.Tokenizer.from_str(trained.model_file()[1].decode("utf-8").replace("<|endoftext|>", "<other>"))
    lib.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).end is None


def test_a_vocabulary_below_the_bytes_is_refused():
    with pytest.raises(ConfigError, match="at least 257"):
        train_bpe([TEXT], 256)
    assert train_bpe([TEXT], 257).vocab == 257


def test_little_text_gives_fewer_ids_than_asked():
    assert 257 < train_bpe(["hello hello world"], 1000).vocab < 300


def test_without_the_package_the_error_names_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(EnvironmentProblem, match="pip install tokenizers"):
        train_bpe([TEXT], 300)
