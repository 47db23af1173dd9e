"""SentencePiece, trained here and loaded."""
from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_lean.data.pieces import cut_pieces
from ipu_lean.data.tokenizers import SentencePieceTokenizer, load_tokenizer, train_sentencepiece, train_tokenizer
from ipu_lean.errors import ConfigError, EnvironmentProblem
from tests.data.helpers import ROOT, prose, python

sentencepiece = pytest.importorskip("sentencepiece")
pytestmark = pytest.mark.pod

TEXT = prose(20000)
LETTERS = "".join(sorted(set(TEXT)))


@pytest.fixture(scope="module")
def trained():
    return train_sentencepiece([TEXT], 150)


def foreign(**settings) -> bytes:
    """A model by the library's own defaults, apart from `settings`."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXT.split("\n")),
        model_writer=written,
        vocab_size=150,
        model_type="bpe",
        minloglevel=2,
        **settings,
    )
    return written.getvalue()


def test_vocabulary_and_special_ids(trained):
    assert (trained.kind, trained.vocab, trained.end) == ("sentencepiece", 150, 1)
    assert trained.encode("\n\n") == [2, 2]
    assert len(trained.encode(TEXT)) < 0.6 * len(TEXT)


@given(st.text(alphabet=LETTERS))
def test_known_characters_come_back_exactly(trained, text):
    assert trained.decode(trained.encode(text)) == text
    assert trained.decode([1, *trained.encode(text), 1, 150, 100000]) == text


@pytest.mark.parametrize("size", [7, 100, 3000])
@pytest.mark.parametrize("settings", [None, {}, {"remove_extra_whitespaces": False}, {"add_dummy_prefix": False}])
def test_pieces_in_a_row_are_the_text(trained, size, settings):
    tokenizer = trained if settings is None else SentencePieceTokenizer(foreign(**settings))
    text = TEXT[:5000]
    longest = max(map(len, text.split(" ")))
    found = tokenizer.encode_pieces(list(cut_pieces([(text, True)], max(size, longest + 2))))
    assert len(found) > 1
    assert np.concatenate(found).tolist() == tokenizer.encode(text)


def test_training_repeats_byte_for_byte_in_another_process(trained, tmp_path):
    code = (
        "import hashlib, sys\nfrom tests.data.helpers import prose\nfrom ipu_lean.data.tokenizers import train_sentencepiece\n"
        "print(hashlib.sha256(train_sentencepiece([prose(20000)], 150).model_file()[1]).hexdigest())"
    )
    for seed in ("1", "2"):
        out, err = python(code, ROOT, {"PYTHONHASHSEED": seed}).communicate(timeout=60)
        assert out.strip() == trained.describe()["sha256"], err


def test_save_and_load(trained, tmp_path):
    trained.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.describe() == trained.describe()
    assert again.encode(TEXT) == trained.encode(TEXT)
    alone = load_tokenizer(tmp_path / "sentencepiece.model")
    assert alone.encode(TEXT) == trained.encode(TEXT)


def test_a_model_without_an_end_of_text_piece():
    found = SentencePieceTokenizer(foreign(eos_id=-1))
    assert found.end is None
    assert SentencePieceTokenizer(foreign()).end == 2


def test_bytes_stand_for_unknown_characters_on_request(trained):
    unknown = "snow \u2603 man"
    assert trained.decode(trained.encode(unknown)) != unknown
    spelled = train_sentencepiece([TEXT], 400, byte_fallback=True)
    assert spelled.decode(spelled.encode(unknown)) == unknown
    with pytest.raises(ConfigError, match="at least 260"):
        train_sentencepiece([TEXT], 200, byte_fallback=True)


def test_lower_coverage_drops_rare_characters():
    text = TEXT + "\u2603"
    full = train_tokenizer("sentencepiece", [text], 150, coverage=1.0)
    most = train_tokenizer("sentencepiece", [text], 150, coverage=0.999)
    assert full.decode(full.encode("\u2603")) == "\u2603"
    assert most.decode(most.encode("\u2603")) != "\u2603"


def test_a_vocabulary_below_the_alphabet_names_the_least_that_works():
    with pytest.raises(ConfigError, match="at least") as caught:
        train_sentencepiece([TEXT], 5)
    assert caught.value.key == "data.tokenizer.vocab"
    least = int(caught.value.rule.split("at least ")[1].split(" ")[0])
    assert train_sentencepiece([TEXT], least).vocab == least
    with pytest.raises(ConfigError):
        train_sentencepiece([TEXT], least - 1)


def test_little_text_gives_fewer_pieces_than_asked():
    assert train_sentencepiece(["hello world"], 500).vocab < 50


def test_very_long_lines_take_part_in_training():
    line = "".join(prose(60000).split("\n"))
    assert len(line) > 12 * 4096
    assert len(train_sentencepiece([line], 150).encode(line)) < 0.6 * len(line)


def test_a_file_that_is_no_model_is_refused(tmp_path):
    path = tmp_path / "wrong.model"
    for content in (b"", b"this is no model", b"\0" * 100):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="wrong.model is not a SentencePiece model"):
            load_tokenizer(path)


def test_a_damaged_model_is_noticed(trained, tmp_path):
    trained.save(tmp_path)
    path = tmp_path / "sentencepiece.model"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ConfigError, match="damaged: its checksum"):
        load_tokenizer(tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_without_the_package_the_error_names_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with pytest.raises(EnvironmentProblem, match="pip install sentencepiece"):
        train_sentencepiece([TEXT], 150)
