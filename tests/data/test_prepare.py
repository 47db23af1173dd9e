"""Preparing against the text itself, encoded in one go; interruption, reuse and damage against an undisturbed preparation."""
from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
import warnings

import numpy as np
import pytest

from ipu_lean.data import TrainBatches, build, expected_vocab, prepare
from ipu_lean.data.build import Plan, build_corpus
from ipu_lean.data.sources import Source
from ipu_lean.data.tokenizers import ByteTokenizer, train_bpe, train_sentencepiece
from ipu_lean.errors import ConfigError
from ipu_lean.ipu.plan.network import network_of
from tests.data.helpers import DOCUMENTS, config, folder_bytes, prose, without_package

pytestmark = pytest.mark.pod


def tokens_of(prepared):
    return prepared.train.read(0, len(prepared.train)).tolist() + [
        token for part in prepared.validation.values() for token in part.read(0, len(part)).tolist()
    ]


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


def test_a_corpus_that_is_costly_to_read_is_sampled_from_its_beginning(tmp_path):
    without_package("bpe")
    document, read = prose(200_000, 5), []

    def fragments(source):
        for start in range(0, len(document), 10_000):
            read.append(start)
            yield document[start : start + 10_000], start + 10_000 >= len(document)

    source = Source("made up", "made-up", {"kind": "test"}, fragments, sample=50_000)
    _, manifest = build_corpus(tmp_path, source, Plan("bpe", None, 300, 1.0, 0.1), "data.corpus", lambda *call: None)
    assert manifest["characters"] == 200_000 and len(read) == 5 + 20
    assert manifest["tokenizer"] == train_bpe([document[:45_000]], 300).describe()


@pytest.mark.parametrize("kind", ["sentencepiece", "bpe"])
def test_a_vocabulary_larger_than_the_text_gives_is_said_each_time(tmp_path, kind):
    """Whether the tokenizer is trained or found prepared; the model gets the rows that there are."""
    without_package(kind)
    (tmp_path / "short.txt").write_text("to be or not to be, that is the question\n" * 20)
    settings = config(tmp_path / "cache", corpus=str(tmp_path / "short.txt"), tokenizer={"kind": kind, "vocab": 900})
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"`data.tokenizer.vocab: 900`.* only (\d+) pieces of " + kind) as caught:
            found = prepare(settings)
        assert f"only {found.vocab} pieces" in str(caught[0].message) and found.vocab < 900
    fitting = config(tmp_path / "cache", corpus=str(tmp_path / "short.txt"), tokenizer={"kind": kind, "vocab": found.vocab})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prepare(fitting).vocab == found.vocab


def test_what_is_expected_of_a_loaded_tokenizer_is_what_it_has(tmp_path):
    """`explain`, `check`, `plan` and `memory` count its rows, not the 4,096 of a tokenizer that is to be trained."""
    without_package("bpe")
    train_bpe([prose(3000, 9)], 350).save(tmp_path / "tok")
    settings = config(tmp_path / "cache", tokenizer={"kind": "bpe", "path": str(tmp_path / "tok")})
    assert expected_vocab(settings) == network_of(settings).vocab == 350
    with pytest.raises(ConfigError) as caught:
        expected_vocab(config(tmp_path / "cache", tokenizer={"kind": "bpe", "path": str(tmp_path / "none")}))
    assert caught.value.key == "data.tokenizer.path"


def test_shares_that_round_up_to_more_than_the_text(tmp_path):
    (tmp_path / "four.txt").write_text("abcd")  # and the end: five tokens, of which three times two are held out
    shares = {"a": 0.3, "b": 0.3, "c": 0.3}
    with pytest.raises(ConfigError, match="shares held out of 5 tokens leave nothing"):
        prepare(config(tmp_path / "cache", seq=1, corpus=str(tmp_path / "four.txt"), validation=shares))


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


def test_the_training_text_may_be_its_own_validation_set(tmp_path, text):
    found = prepare(config(tmp_path / "cache", corpus=str(text), validation={"held": 0.1, "learnt": "train"}))
    learnt, train = found.validation["learnt"], found.train
    assert list(found.validation) == ["held", "learnt"] and len(learnt) == len(train) > 0
    assert learnt.read(0, len(learnt)).tolist() == train.read(0, len(train)).tolist()
    assert found.manifest["sets"]["learnt"] == found.manifest["sets"]["train"]
