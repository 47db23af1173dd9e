"""Preparing against the text itself, encoded in one go; interruption, reuse and damage against an undisturbed preparation."""
from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import shutil
import sys

import numpy as np
import pytest

from ipu_lean.data import TrainBatches, build, prepare
from ipu_lean.data.build import Plan, build_corpus
from ipu_lean.data.sources import Source
from ipu_lean.data.tokenizers import ByteTokenizer, train_bpe, train_sentencepiece
from ipu_lean.errors import ConfigError, EnvironmentProblem, RunError
from tests.data.helpers import config, folder_bytes, prose

pytestmark = pytest.mark.pod

DOCUMENTS = [prose(150_000, 1), prose(10, 2), prose(66_000, 3), prose(131_072, 4)]


@pytest.fixture
def text(tmp_path):
    """A folder of four documents, two of them longer than a piece, and an empty one."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number, document in enumerate(DOCUMENTS):
        (folder / f"{number}.txt").write_bytes(document.encode("utf-8"))
    (folder / "1-empty.txt").write_bytes(b"")
    return folder


def tokens_of(prepared):
    return prepared.train.read(0, len(prepared.train)).tolist() + [
        token for part in prepared.validation.values() for token in part.read(0, len(part)).tolist()
    ]


def without_package(kind):
    if kind != "bytes":
        pytest.importorskip({"bpe": "tokenizers"}.get(kind, kind))


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "bpe"])
def test_the_tokens_are_the_documents_encoded_whole_each_with_its_end(tmp_path, text, kind):
    without_package(kind)
    settings = {"kind": kind} if kind == "bytes" else {"kind": kind, "vocab": 300}
    found = prepare(config(tmp_path / "cache", corpus=str(text), tokenizer=settings, validation={"a": 0.1, "b": 0.05}))
    whole = [token for document in DOCUMENTS for token in [*found.tokenizer.encode(document), found.tokenizer.end]]
    assert tokens_of(found) == whole
    assert found.manifest["documents"] == 4 and found.manifest["characters"] == sum(map(len, DOCUMENTS))
    assert found.manifest["tokens"] == len(whole) and found.vocab == found.tokenizer.vocab
    sizes = {name: len(part) for name, part in found.validation.items()}
    assert sizes == {"a": round(0.1 * len(whole)), "b": round(0.05 * len(whole))}
    assert found.tokenizer.decode(whole) == "".join(DOCUMENTS)


@pytest.mark.parametrize("kind, train", [("sentencepiece", train_sentencepiece), ("bpe", train_bpe)])
def test_tokenizers_do_not_see_the_held_out_text(tmp_path, text, kind, train):
    without_package(kind)
    (text / "9.txt").write_text("\u2603 " * 20_000, encoding="utf-8")
    found = prepare(config(tmp_path / "cache", corpus=str(text), tokenizer={"kind": kind, "vocab": 300}, validation={"v": 0.5}))
    whole = "".join(DOCUMENTS) + "\u2603 " * 20_000
    seen = whole[: len(whole) - -(-len(whole) // 2)]
    assert "\u2603" not in seen
    parts, place = [], 0
    for document in DOCUMENTS:
        parts.append(seen[place : place + len(document)])
        place += len(document)
    assert found.tokenizer.model_file() == train([part for part in parts if part], 300).model_file()
    assert train([*DOCUMENTS, "\u2603 " * 20_000], 300).model_file() != found.tokenizer.model_file()


def test_a_loaded_tokenizer_is_used_as_it_is(tmp_path, text):
    without_package("bpe")
    tokenizer = train_bpe(["abc " * 100 + prose(3000, 9)], 350)
    tokenizer.save(tmp_path / "tok")
    settings = {"kind": "bpe", "path": str(tmp_path / "tok")}
    found = prepare(config(tmp_path / "cache", corpus=str(text), tokenizer=settings))
    assert tokens_of(found)[:50] == tokenizer.encode(DOCUMENTS[0][:1000])[:50]
    assert found.tokenizer.describe() == tokenizer.describe()
    with pytest.raises(ConfigError, match="holds a tokenizer of the kind bpe") as caught:
        prepare(config(tmp_path / "cache", corpus=str(text), tokenizer={**settings, "kind": "sentencepiece"}))
    assert caught.value.key == "data.tokenizer.kind"


def test_a_loaded_tokenizer_larger_than_the_model_is_refused_before_any_work(tmp_path, text):
    without_package("bpe")
    from ipu_lean.config import make_config

    train_bpe([prose(3000, 9)], 350).save(tmp_path / "tok")
    data = {"corpus": str(text), "cache": str(tmp_path / "cache"), "tokenizer": {"kind": "bpe", "path": str(tmp_path / "tok")}}
    with pytest.raises(ConfigError, match="300 embeddings"):
        prepare(make_config(model={"seq": 16, "vocab": 300}, mup={"base_width": 64}, data=data))
    assert not (tmp_path / "cache").exists()


def test_a_large_vocabulary_is_stored_in_four_bytes(tmp_path, text, monkeypatch):
    class Wide(ByteTokenizer):
        vocab = 70_000

        def encode_pieces(self, pieces):
            return [ids.astype(np.int64) + 69_000 for ids in super().encode_pieces(pieces)]

    monkeypatch.setattr(sys.modules["ipu_lean.data.prepare"], "ByteTokenizer", Wide)
    found = prepare(config(tmp_path / "cache", corpus=str(text)))
    assert found.train.dtype.itemsize == 4
    content = DOCUMENTS[0].encode("utf-8")[:100]
    assert found.train.read(0, 100).tolist() == [byte + 69_000 for byte in content]


def test_validation_from_another_corpus_uses_the_same_tokenizer(tmp_path, text):
    without_package("sentencepiece")
    (tmp_path / "other.txt").write_text(prose(5000, 7), encoding="utf-8")
    sets = {"held": 0.05, "other": str(tmp_path / "other.txt")}
    settings = {"kind": "sentencepiece", "vocab": 200}
    found = prepare(config(tmp_path / "cache", corpus=str(text), tokenizer=settings, validation=sets))
    assert list(found.validation) == ["held", "other"]
    assert found.validation["other"].read(0, len(found.validation["other"])).tolist() == [
        *found.tokenizer.encode(prose(5000, 7)),
        1,
    ]
    bounds = found.manifest["sets"]
    assert bounds["train"]["start"] == 0 and bounds["train"]["stop"] == bounds["held"]["start"]
    assert bounds["held"]["stop"] == found.manifest["tokens"]


def test_a_missing_validation_corpus_is_found_before_any_work(tmp_path, text):
    with pytest.raises(ConfigError, match="no such file") as caught:
        prepare(config(tmp_path / "cache", corpus=str(text), validation={"far": str(tmp_path / "absent.txt")}))
    assert caught.value.key == "data.validation.far" and not (tmp_path / "cache").exists()


def test_the_manifest_describes_every_file(tmp_path, text):
    found = prepare(config(tmp_path / "cache", corpus=str(text)))
    content = folder_bytes(found.path)
    manifest = json.loads(content.pop("manifest.json"))
    assert {name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()} for name, data in content.items()} == manifest[
        "files"
    ]
    assert {**manifest, "sets": found.manifest["sets"]} == found.manifest
    assert manifest["source"]["spec"] == str(text) and manifest["tokenizer"] == ByteTokenizer().describe()


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


def test_progress_runs_to_the_end_of_the_bytes(tmp_path, text):
    without_package("bpe")
    calls = []
    prepare(config(tmp_path / "cache", corpus=str(text), tokenizer={"kind": "bpe"}), lambda *call: calls.append(call))
    size = sum(path.stat().st_size for path in text.iterdir())
    stages = [stage for stage, _, _ in calls]
    assert sorted(set(stages), key=stages.index) == ["sample", "train tokenizer", "tokenize"]
    for stage in ("sample", "tokenize"):
        done = [call[1] for call in calls if call[0] == stage]
        assert done == sorted(done) and done[-1] == size
        assert {call[2] for call in calls if call[0] == stage} == {size}


def test_memory_stays_bounded_whatever_the_corpus(tmp_path):
    tracemalloc = pytest.importorskip("tracemalloc")
    block = prose(1 << 16) * 16

    def read(source):
        for number in range(64):
            yield block, number % 32 == 31

    source = Source("made up", "made-up", {"kind": "test"}, read)
    tracemalloc.start()
    try:
        _, manifest = build_corpus(tmp_path, source, Plan("bytes", ByteTokenizer()), "data.corpus", lambda *call: None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert manifest["characters"] == 64 << 20 and manifest["documents"] == 2
    assert peak < 32 << 20


def test_what_is_prepared_can_be_sent_to_another_process(tmp_path, text):
    found = prepare(config(tmp_path / "cache", corpus=str(text)))
    part = pickle.loads(pickle.dumps(found.train))
    ours, theirs = (TrainBatches.create(tokens, 16, 4, seed=0).next() for tokens in (found.train, part))
    np.testing.assert_array_equal(ours, theirs)


def test_without_locks_two_calls_at_a_time_do_not_disturb_each_other(tmp_path, text, monkeypatch):
    monkeypatch.setattr("ipu_lean.data.store.fcntl", None)
    settings = config(tmp_path / "cache", corpus=str(text))
    seen = []

    def progress(stage, done, total):
        if not seen:
            seen.append(1)
            monkeypatch.setattr(build.os, "getpid", lambda: 999_999)  # another process, at the same time
            seen.append(folder_bytes(prepare(settings).path))
            monkeypatch.undo()
            monkeypatch.setattr("ipu_lean.data.store.fcntl", None)

    found = prepare(settings, progress)
    assert folder_bytes(found.path) == seen[1]
    assert sorted(os.listdir(tmp_path / "cache")) == sorted([found.path.name, "locks"])
