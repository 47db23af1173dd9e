"""Labelled texts laid down once: order, shares, classes, tokens, and what is found again or made anew."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from ipu_lean.data.labelled import (
    LabelledBatches,
    expected_classes,
    labelled_eval_batches,
    labelled_fingerprint,
    prepare_labelled,
    prepare_other,
    reopen_labelled,
)
from ipu_lean.errors import CheckpointError, ConfigError, RunError
from tests.data.helpers import without_package
from tests.data.labelled.helpers import draw, labelled_config, write_csv, write_jsonl

pytestmark = pytest.mark.pod


def decoded(prepared, texts, seq: int = 99):
    """(text, class name) pairs of a whole set, read through its batches."""
    rows, labels = texts.take(np.arange(len(texts)), seq)
    names = prepared.classes
    return [(prepared.tokenizer.decode(row[row >= 0]), names[label]) for row, label in zip(rows, labels)]


def test_every_text_is_there_once_with_its_class(tmp_path):
    prepared = prepare_labelled(labelled_config(tmp_path))
    assert prepared.classes == ["bird", "fish", "stone"] and prepared.vocab == 257
    assert (len(prepared.train), len(prepared.validation["valid"])) == (90, 30)
    found = decoded(prepared, prepared.train) + decoded(prepared, prepared.validation["valid"])
    assert sorted(found) == sorted(draw(120)) and found != draw(120)
    assert {label for _, label in decoded(prepared, prepared.validation["valid"])} == set(prepared.classes)


def test_a_row_begins_with_the_end_token_and_is_padded_or_cut(tmp_path):
    prepared = prepare_labelled(labelled_config(tmp_path))
    texts = decoded(prepared, prepared.train)
    rows, labels = prepared.train.take(np.arange(90), 12)
    assert rows.dtype == labels.dtype == np.int32 and rows.shape == (90, 12)
    for row, (text, _) in zip(rows, texts):
        wanted = [256, *text.encode("utf-8")][:12]
        assert row.tolist() == wanted + [-1] * (12 - len(wanted))
    assert (rows == -1).any() and (rows[:, -1] >= 0).any()
    with pytest.raises(IndexError):
        prepared.train.take(np.array([90]), 12)


def test_found_again_and_made_again(tmp_path):
    config = labelled_config(tmp_path)
    prepared = prepare_labelled(config)
    stamp = (prepared.path / "manifest.json").stat().st_mtime_ns
    assert prepare_labelled(config, verify=True).path == prepared.path
    assert (prepared.path / "manifest.json").stat().st_mtime_ns == stamp
    again = reopen_labelled(prepared.path, prepared.manifest)
    assert labelled_fingerprint(again.manifest) == labelled_fingerprint(prepared.manifest)
    assert decoded(again, again.train) == decoded(prepared, prepared.train)
    (prepared.path / "labels.npy").write_bytes(b"short")
    assert reopen_labelled(prepared.path, prepared.manifest) is None
    assert decoded(prepare_labelled(config), prepare_labelled(config).train) == decoded(again, again.train)
    (tmp_path / "cache" / f".{prepared.path.name}.part").mkdir()  # what a killed call leaves
    (tmp_path / "cache" / f".{prepared.path.name}.part" / "tokens.u16").write_bytes(b"xx")
    shutil.rmtree(prepared.path)
    assert labelled_fingerprint(prepare_labelled(config).manifest) == labelled_fingerprint(prepared.manifest)


def test_another_file_is_measured_with_the_training_texts_numbers(tmp_path):
    write_csv(tmp_path / "test.csv", [("grey ore", "stone"), ("a net", "fish")])  # without birds, in another order
    config = labelled_config(tmp_path, data={"validation": {"test": str(tmp_path / "test.csv")}})
    prepared = prepare_labelled(config)
    assert len(prepared.train) == 120
    assert sorted(decoded(prepared, prepared.validation["test"])) == [("a net", "fish"), ("grey ore", "stone")]
    other = prepare_other(config, str(tmp_path / "test.csv"), prepared, "--data")
    assert decoded(prepared, other) == decoded(prepared, prepared.validation["test"])
    write_csv(tmp_path / "test.csv", [("grey ore", "stone"), ("a bear", "beast")])
    with pytest.raises(ConfigError, match="class 'beast'") as caught:
        prepare_labelled(config)
    assert caught.value.key == "data.validation.test"
    with pytest.raises(ConfigError) as caught:
        prepare_other(config, str(tmp_path / "test.csv"), prepared, "--data")
    assert caught.value.key == "--data"


def test_classes_are_numbered_alike_whatever_the_file_was_used_for_before(tmp_path):
    """First as a validation set, which may have one class only, then to train on."""
    marks = write_jsonl(tmp_path / "marks.jsonl", [(f"a text {number}", 2 + 8 * (number % 2)) for number in range(12)])
    one = write_jsonl(tmp_path / "one.jsonl", [("a text", 2), ("another", 2)])
    beside = {"a": str(marks), "b": str(one)}
    prepared = prepare_labelled(labelled_config(tmp_path, marks, data={"validation": beside}))
    fresh = prepare_labelled(labelled_config(tmp_path, marks, data={"cache": str(tmp_path / "another cache")}))
    train = write_jsonl(tmp_path / "train.jsonl", [(f"a text {number}", number % 11) for number in range(22)])
    prepare_labelled(labelled_config(tmp_path, train, data={"validation": beside, "cache": str(tmp_path / "third cache")}))
    again = prepare_labelled(labelled_config(tmp_path, marks, data={"cache": str(tmp_path / "third cache")}))
    assert prepared.classes == fresh.classes == again.classes == ["2", "10"]
    assert decoded(again, again.train) == decoded(fresh, fresh.train)
    with pytest.raises(ConfigError, match="all texts are of the class '2'"):
        prepare_labelled(labelled_config(tmp_path, one, data={"cache": str(tmp_path / "third cache")}))


@pytest.mark.parametrize("kind, vocab", [("bpe", 300), ("sentencepiece", 60)])
def test_a_tokenizer_is_trained_on_the_texts_that_are_not_held_out(tmp_path, kind, vocab):
    without_package(kind)
    pairs = draw(118) + [("zyzzyva " * 3, "fish"), ("zyzzyva", "bird")]
    write_jsonl(tmp_path / "texts.jsonl", pairs)
    config = labelled_config(tmp_path, data={"tokenizer": {"kind": kind, "vocab": vocab}})
    prepared = prepare_labelled(config)
    assert prepared.vocab <= vocab and prepared.tokenizer.kind == kind
    found = decoded(prepared, prepared.train, 200)
    if kind == "bpe":
        assert all(pair in pairs for pair in found)
    rows, _ = prepared.train.take(np.arange(len(prepared.train)), 200)
    assert rows.max() < prepared.vocab and (rows >= 0).sum() < sum(len(text) + 1 for text, _ in found)  # shorter than bytes


def test_the_training_texts_may_be_measured_themselves(tmp_path):
    prepared = prepare_labelled(labelled_config(tmp_path, data={"validation": {"heart": "train", "valid": 0.25}}))
    assert list(prepared.validation) == ["heart", "valid"]
    assert decoded(prepared, prepared.validation["heart"]) == decoded(prepared, prepared.train)


def test_classes_are_counted_before_or_after(tmp_path):
    assert expected_classes(labelled_config(tmp_path)) == 3
    assert expected_classes(labelled_config(tmp_path, model={"classes": 7})) == 7
    assert expected_classes(labelled_config(tmp_path, "docs-or-code")) == 2


def test_shares_that_hold_nothing(tmp_path):
    with pytest.raises(ConfigError, match="this share of 120 texts is none") as caught:
        prepare_labelled(labelled_config(tmp_path, data={"validation": {"valid": 0.001}}))
    assert caught.value.key == "data.validation.valid"


def test_a_file_that_grows_while_it_is_read(tmp_path, monkeypatch):
    from ipu_lean.data.labelled import prepare

    config = labelled_config(tmp_path)
    count = prepare._count

    def grow(source, report):
        found = count(source, report)
        with open(tmp_path / "texts.jsonl", "a") as file:
            file.write('{"text": "late", "label": "fish"}\n')
        return found

    monkeypatch.setattr(prepare, "_count", grow)
    with pytest.raises(RunError, match="changed while it was read"):
        prepare_labelled(config)


def test_a_file_whose_labels_change_while_it_is_read(tmp_path, monkeypatch):
    """As many texts as before, so that only the file's own size and time tell."""
    from ipu_lean.data.labelled import prepare

    config = labelled_config(tmp_path)
    count = prepare._count

    def turn_round(source, report):
        found = count(source, report)
        write_jsonl(tmp_path / "texts.jsonl", draw(120)[::-1])
        return found

    monkeypatch.setattr(prepare, "_count", turn_round)
    with pytest.raises(RunError, match="changed while it was read"):
        prepare_labelled(config)


def test_batches_in_a_seeded_order_that_resumes(tmp_path):
    texts = prepare_labelled(labelled_config(tmp_path)).train
    whole = LabelledBatches(texts, 32, 7, seed=5)
    rows = [whole.next() for _ in range(30)]
    epoch = np.concatenate([tokens for tokens, _ in rows])[:90]
    assert len({row.tobytes() for row in epoch}) == len({row.tobytes() for row in texts.take(np.arange(90), 32)[0]})
    half = LabelledBatches(texts, 32, 7, seed=5)
    for _ in range(14):
        half.next()
    other = LabelledBatches(texts, 32, 7, seed=6)
    other.load_state_dict(half.state_dict())
    for tokens, labels in rows[14:]:
        again = other.next()
        assert np.array_equal(again[0], tokens) and np.array_equal(again[1], labels)
    with pytest.raises(CheckpointError, match="90 texts of 32 tokens"):
        LabelledBatches(texts, 16, 7, seed=5).load_state_dict(half.state_dict())
    with pytest.raises(ConfigError, match="90 texts to train on; one global batch needs 91"):
        LabelledBatches(texts, 32, 91, seed=5)


def test_a_set_is_measured_text_by_text(tmp_path):
    texts = prepare_labelled(labelled_config(tmp_path)).validation["valid"]
    batches = list(labelled_eval_batches(texts, 32, 8))
    assert [tokens.shape for tokens, _ in batches] == [(8, 32)] * 4
    labels = np.concatenate([labels for _, labels in batches])
    assert (labels[:30] == texts.take(np.arange(30), 32)[1]).all() and (labels[30:] == -100).all()
    assert len(list(labelled_eval_batches(texts, 32, 8, limit=2))) == 2
