"""Files that are no tokenizer."""
from __future__ import annotations

import json

import pytest

from ipu_lean.data import load_tokenizer
from ipu_lean.errors import ConfigError

pytestmark = pytest.mark.pod


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("tokenizer.json", "not json", "is not JSON"),
        ("tokenizer.json", "[1, 2]", "neither a tokenizer of ours"),
        ("tokenizer.json", "{}", "neither a tokenizer of ours"),
        ("tokenizer.json", json.dumps({"schema": 99, "kind": "bytes"}), "another release"),
        ("tokenizer.json", json.dumps({"schema": 1, "kind": "morse"}), "another release"),
        ("tokenizer.json", json.dumps({"model": {"type": "none"}}), "not a tokenizer of the library"),
        ("tokenizer.json", json.dumps({"schema": 1, "kind": "bpe", "file": "bpe.json"}), "bpe.json.* cannot be read"),
        ("book.txt", "It was a dark night.", "neither a SentencePiece .model nor"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, name, content, message):
    if "library" in message:
        pytest.importorskip("tokenizers")
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        load_tokenizer(tmp_path / name)
    assert caught.value.key == "data.tokenizer.path"


def test_nothing_there(tmp_path):
    with pytest.raises(ConfigError, match="no such file or folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ConfigError, match="the folder holds no tokenizer.json"):
        load_tokenizer(tmp_path)
