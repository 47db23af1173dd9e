"""Prepared text that is found again, that is damaged, and preparations that are refused."""
from __future__ import annotations

import logging
import os
import shutil

import pytest

from ipu_lean.data import prepare
from ipu_lean.errors import ConfigError, EnvironmentProblem, RunError
from tests.data.helpers import DOCUMENTS, config, folder_bytes, without_package

pytestmark = pytest.mark.pod


def test_a_second_call_reuses_and_another_text_or_setting_does_not(tmp_path, text):
    stages = []

    def run(**settings):
        stages.clear()
        return prepare(
            config(tmp_path / "cache", **{"corpus": str(text), **settings}), lambda stage, done, total: stages.append(stage)
        )

    first = run()
    before = folder_bytes(first.path)
    assert set(stages) == {"tokenize"}
    assert run().path == first.path and not stages and folder_bytes(first.path) == before
    assert run(validation={"v": 0.3, "w": 0.2}).path == first.path and not stages
    assert len(run(validation={}).train) == first.manifest["tokens"]
    assert run(limit=100_000).manifest["characters"] == 100_000 and stages
    changed = os.stat(text / "0.txt").st_mtime_ns
    os.utime(text / "0.txt", ns=(changed, changed + 10**9))
    assert run().path != first.path and stages
    copy = shutil.copytree(str(text), str(tmp_path / "copy"))
    assert run(corpus=copy).path != first.path and stages


@pytest.mark.parametrize("damage", ["short", "absent", "manifest absent", "manifest cut", "tokenizer"])
def test_damage_is_noticed_and_repaired(tmp_path, text, damage, caplog):
    without_package("sentencepiece")
    settings = config(tmp_path / "cache", corpus=str(text), tokenizer={"kind": "sentencepiece", "vocab": 200})
    path = prepare(settings).path
    before = folder_bytes(path)
    tokens = path / "tokens.u16"
    if damage == "short":
        tokens.write_bytes(before["tokens.u16"][:-2])
    elif damage == "absent":
        tokens.unlink()
    elif damage == "manifest absent":
        (path / "manifest.json").unlink()
    elif damage == "manifest cut":
        (path / "manifest.json").write_bytes(before["manifest.json"][:-20])
    else:
        model = before["tokenizer/sentencepiece.model"]
        (path / "tokenizer" / "sentencepiece.model").write_bytes(model[:100] + b"\x01" + model[101:])
    with caplog.at_level(logging.WARNING, logger="ipu_lean"):
        prepare(settings)
    assert [record for record in caplog.records if "is damaged" in record.getMessage()]
    assert folder_bytes(path) == before
    assert not [name for name in os.listdir(tmp_path / "cache") if name.startswith(".")]


def test_a_changed_token_is_noticed_on_request(tmp_path, text, caplog):
    settings = config(tmp_path / "cache", corpus=str(text))
    path = prepare(settings).path
    before = folder_bytes(path)
    with open(path / "tokens.u16", "r+b") as file:
        file.seek(1000)
        file.write(b"\xff\x00")
    prepare(settings)
    assert folder_bytes(path) != before and not caplog.records
    prepare(settings, verify=True)
    assert folder_bytes(path) == before and "another checksum" in caplog.text


@pytest.mark.parametrize("content", [None, ""])
def test_an_empty_corpus_is_refused_and_leaves_nothing(tmp_path, content):
    (tmp_path / "empty.txt").write_text("", encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text('{"text": ""}\n\n', encoding="utf-8")
    corpus = tmp_path / ("empty.txt" if content is None else "rows.jsonl")
    for tokenizer in ({"kind": "bytes"}, {"kind": "bpe"}):
        with pytest.raises(ConfigError, match="the corpus is empty") as caught:
            prepare(config(tmp_path / "cache", corpus=str(corpus), tokenizer=tokenizer))
        assert caught.value.key == "data.corpus"
        assert os.listdir(tmp_path / "cache") == ["locks"]


def test_text_shorter_than_a_window_is_refused_with_the_numbers(tmp_path):
    (tmp_path / "short.txt").write_text("x" * 99, encoding="utf-8")  # 100 tokens, 95 of them for training
    with pytest.raises(ConfigError, match="95 tokens, and one window of `model.seq` = 95 needs 96"):
        prepare(config(tmp_path / "cache", seq=95, corpus=str(tmp_path / "short.txt")))
    prepare(config(tmp_path / "cache", seq=94, corpus=str(tmp_path / "short.txt")))
    with pytest.raises(ConfigError, match="this validation set has 1 tokens") as caught:
        prepare(config(tmp_path / "cache", corpus=str(tmp_path / "short.txt"), validation={"tiny": 0.01}))
    assert caught.value.key == "data.validation.tiny"


def test_a_corpus_that_changes_under_the_reader_is_refused(tmp_path, text):
    def progress(stage, done, total):
        (text / "0.txt").write_text("changed", encoding="utf-8")

    with pytest.raises(RunError, match="changed while it was read"):
        prepare(config(tmp_path / "cache", corpus=str(text)), progress)
    assert os.listdir(tmp_path / "cache") == ["locks"]


def test_an_unreadable_document_leaves_no_folder_of_the_final_name(tmp_path, text):
    (text / "2.txt").write_bytes(DOCUMENTS[2].encode("utf-8") + b"\xff")
    with pytest.raises(ConfigError, match="2.txt is not UTF-8"):
        prepare(config(tmp_path / "cache", corpus=str(text)))
    assert not [name for name in os.listdir(tmp_path / "cache") if not name.startswith(".") and name != "locks"]


def test_a_cache_that_cannot_be_written_is_an_environment_problem(tmp_path, text):
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    with pytest.raises(EnvironmentProblem, match="Set data.cache to a folder of yours"):
        prepare(config(tmp_path / "file" / "cache", corpus=str(text)))
