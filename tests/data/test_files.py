"""Corpora that are files, against the bytes in them."""
from __future__ import annotations

import gzip
import json
import os

import pytest

from ipu_lean.data.corpora import open_corpus
from ipu_lean.data.sources import BLOCK
from ipu_lean.errors import ConfigError
from tests.data.helpers import prose

pytestmark = pytest.mark.pod


def documents(source):
    """The whole documents of a source."""
    found, current = [], ""
    for text, ends in source.fragments():
        assert text and len(text) <= BLOCK
        current += text
        if ends:
            found.append(current)
            current = ""
    assert current == ""
    return found


def corpus(path, **settings):
    return open_corpus(str(path), **settings)


def test_a_file_is_one_document_kept_as_it_is(tmp_path):
    text = "\r\nOne.\r\n\n\tTwo \u2019\x0c\n" + prose(1000) + " "
    (tmp_path / "book.tex").write_bytes(text.encode("utf-8"))
    source = corpus(tmp_path / "book.tex")
    assert documents(source) == [text]
    assert source.size == source.consumed == len(text.encode("utf-8"))
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbf" + text.encode("utf-8"))
    assert documents(corpus(tmp_path / "marked.txt")) == [text]


def test_characters_that_lie_across_blocks_are_whole(tmp_path):
    for shift in range(4):
        text = "x" * (BLOCK - shift) + "\U0001f600" + "é" * BLOCK
        (tmp_path / "long.txt").write_text(text, encoding="utf-8")
        assert documents(corpus(tmp_path / "long.txt")) == [text]


def test_a_file_of_exactly_one_block(tmp_path):
    (tmp_path / "block.txt").write_text("y" * BLOCK, encoding="utf-8")
    assert documents(corpus(tmp_path / "block.txt")) == ["y" * BLOCK]


def test_a_folder_is_read_in_sorted_order_whatever_the_file_system_says(tmp_path):
    for name in ("b.txt", "a.md", "sub/c.txt", "sub/deep/a.txt", "Z.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name, encoding="utf-8")
    for name in (".hidden.txt", "picture.png", ".git/notes.txt", "sub/empty.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if "empty" in name else "not this", encoding="utf-8")
    with gzip.open(tmp_path / "c.txt.gz", "wb") as file:
        file.write(b"c.txt.gz")
    names = ["Z.txt", "a.md", "b.txt", "c.txt.gz", "sub/c.txt", "sub/deep/a.txt"]
    assert documents(corpus(tmp_path)) == names
    assert documents(corpus(tmp_path / "**" / "*.txt")) == ["Z.txt", "b.txt", "sub/c.txt", "sub/deep/a.txt"]
    assert documents(corpus(tmp_path / "sub" / "?.txt")) == ["sub/c.txt"]


def test_a_file_whose_name_looks_like_a_pattern(tmp_path):
    (tmp_path / "what[1]*.txt").write_text("this one", encoding="utf-8")
    assert documents(corpus(tmp_path / "what[1]*.txt")) == ["this one"]


def test_home_is_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    assert documents(open_corpus("~/mine.txt")) == documents(open_corpus("~/*.txt")) == ["mine"]


@pytest.mark.parametrize("packed", [False, True])
def test_each_line_of_jsonl_is_a_document(tmp_path, packed):
    texts = ["one\ntwo", "", "  three ", "\u2019" * 2000, "a\u2028b", "x" * (BLOCK + 5)]
    lines = "".join(json.dumps({"body": text, "n": 1}, ensure_ascii=number % 2 == 0) + "\n" for number, text in enumerate(texts))
    content = ("\ufeff" + lines + "\n\n").encode("utf-8")
    name = "rows.jsonl.gz" if packed else "rows.jsonl"
    (tmp_path / name).write_bytes(gzip.compress(content) if packed else content)
    assert documents(corpus(tmp_path / name, text_key="body")) == [text for text in texts if text]


def test_unpaired_surrogates_become_replacement_characters(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a\\ud800b \\ud83d\\ude00"}\n', encoding="utf-8")
    assert documents(corpus(tmp_path / "rows.jsonl")) == ["a\ufffdb \U0001f600"]


@pytest.mark.parametrize(
    "line, message, suggestion",
    [
        ('{"text": "cut off', "this line is not JSON", None),
        ('{"body": "x"}', "no text under the key 'text'", "its keys are 'body'"),
        ('{"text": 3}', "the text under 'text' is not a string", None),
        ('{"text": null}', "the text under 'text' is not a string", None),
        ('["text"]', "no text under the key 'text'", "a line is an object"),
    ],
)
def test_a_bad_line_is_named_with_file_and_number(tmp_path, line, message, suggestion):
    (tmp_path / "rows.jsonl").write_text('{"text": "fine"}\n\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        documents(corpus(tmp_path / "rows.jsonl"))
    assert (caught.value.file, caught.value.line) == (str(tmp_path / "rows.jsonl"), 3)
    assert caught.value.suggestion == suggestion


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("place", [0, 7, BLOCK - 1, BLOCK, BLOCK + 100])
def test_another_encoding_is_refused_with_the_place(tmp_path, place, packed):
    content = b"a" * place + "\u00fcber".encode("latin-1") + b"b" * 50
    (tmp_path / "old.txt").write_bytes(gzip.compress(content) if packed else content)
    if packed:
        os.rename(tmp_path / "old.txt", tmp_path / "old.txt.gz")
    with pytest.raises(ConfigError, match=rf"old.txt(\.gz)? is not UTF-8 text \(byte {place:,}\)") as caught:
        documents(corpus(tmp_path))
    assert "iconv" in str(caught.value) and caught.value.key == "data.corpus"


def test_a_binary_file_is_called_one(tmp_path):
    (tmp_path / "picture.txt").write_bytes(b"\x89PNG\0\0\xff")
    with pytest.raises(ConfigError, match="picture.txt is a binary file, not text: it holds NUL bytes.$"):
        documents(corpus(tmp_path))
    (tmp_path / "picture.txt").write_text("text after all", encoding="utf-16")
    with pytest.raises(ConfigError, match="iconv"):
        documents(corpus(tmp_path))


def test_neither_a_file_nor_a_folder():
    with pytest.raises(ConfigError, match="/dev/null.*neither a regular file nor a folder"):
        open_corpus("/dev/null")


def test_a_character_cut_off_at_the_end_and_a_line_in_another_encoding(tmp_path):
    (tmp_path / "cut.txt").write_bytes(b"abc\xc3")
    with pytest.raises(ConfigError, match="byte 3"):
        documents(corpus(tmp_path / "cut.txt"))
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "fine"}\n{"text": "\xfc"}\n')
    with pytest.raises(ConfigError, match="line 2"):
        documents(corpus(tmp_path / "rows.jsonl"))


def test_a_gzip_file_cut_short_or_false_is_refused(tmp_path):
    whole = gzip.compress(prose(100000).encode("utf-8"))
    for content in (whole[:-10], whole[: len(whole) // 2], b"plain text", whole[:500] + b"\0" * 50 + whole[550:]):
        (tmp_path / "bad.txt.gz").write_bytes(content)
        with pytest.raises(ConfigError, match="bad.txt.gz is not (a whole gzip file|UTF-8 text)"):
            documents(corpus(tmp_path / "bad.txt.gz"))


def test_nothing_to_read_is_refused(tmp_path):
    (tmp_path / "Moby_Dick.txt").write_text("Call me Ishmael.", encoding="utf-8")
    (tmp_path / "pictures").mkdir()
    with pytest.raises(ConfigError, match="no such file or folder.*Did you mean .*Moby_Dick.txt"):
        corpus(tmp_path / "moby_dick.txt")
    with pytest.raises(ConfigError, match="The folder .* does not exist either"):
        corpus(tmp_path / "absent" / "x.txt")
    with pytest.raises(ConfigError, match="the folder holds no .txt, .md, .jsonl"):
        corpus(tmp_path / "pictures")
    with pytest.raises(ConfigError, match="no file matches"):
        corpus(tmp_path / "*.md")


def test_the_limit_counts_characters_over_all_documents(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 10, encoding="utf-8")
    whole = "a" * 10 + "b" * 10 + "c" * 10
    for limit in range(1, 33):
        found = documents(corpus(tmp_path, limit=limit))
        assert "".join(found) == whole[:limit]
        assert len(found) == -(-min(limit, 30) // 10)


def test_the_limit_ends_a_document_that_it_cuts(tmp_path):
    (tmp_path / "long.txt").write_text("x" * (2 * BLOCK), encoding="utf-8")
    for limit in (5, BLOCK, BLOCK + 5, 2 * BLOCK, 3 * BLOCK):
        assert list(map(len, documents(corpus(tmp_path / "long.txt", limit=limit)))) == [min(limit, 2 * BLOCK)]


def test_the_identity_changes_with_the_files_and_not_otherwise(tmp_path):
    (tmp_path / "a.txt").write_text("aaaa", encoding="utf-8")
    first = corpus(tmp_path)
    assert corpus(tmp_path).identity == first.identity and not first.changed()
    before = os.stat(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("bbbb", encoding="utf-8")
    os.utime(tmp_path / "a.txt", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    second = corpus(tmp_path)
    assert second.identity != first.identity and first.changed()
    (tmp_path / "b.txt").write_text("", encoding="utf-8")
    assert corpus(tmp_path).identity != second.identity
    assert json.loads(json.dumps(first.identity)) == first.identity
    os.unlink(tmp_path / "a.txt")
    assert second.changed()
