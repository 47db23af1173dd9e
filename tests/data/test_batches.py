"""Batches against loops over Python lists."""
from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipu_lean.data import IGNORED, ResumableSampler, TokenFile, TrainBatches, check_vocab, eval_batches, window_count
from ipu_lean.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.pod


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    ids = np.random.RandomState(1).randint(0, 60000, size=500).astype("<u2")
    path = tmp_path_factory.mktemp("tokens") / "tokens.u16"
    path.write_bytes(ids.tobytes())
    return path, ids.tolist()


@settings(max_examples=15)
@given(length=st.integers(3, 500), seq=st.integers(4, 40), rows=st.integers(1, 4), seed=st.integers(0, 5))
def test_shifted_windows_cover_the_text_from_another_place_in_each_epoch(stored, length, seq, rows, seed):
    path, ids = stored
    ids, count = ids[:length], window_count(length, seq)
    if count < rows:
        return
    batches = TrainBatches.create(TokenFile(path, 0, length), seq, rows, seed=seed, shuffle=False, shift=True)
    seen = []
    for _ in range(3 * count):
        inputs, labels = batches.next()
        seen += [[*row, int(last)] for row, last in zip(inputs.tolist(), labels[:, -1])]
    twice, starts = ids + ids + ids, []
    for epoch in range(len(seen) // count):
        stretch = seen[epoch * count]
        start = next(at for at in range(length) if twice[at : at + seq + 1] == stretch)
        for number in range(count):
            begin = (start + number * seq) % length
            assert seen[epoch * count + number] == twice[begin : begin + seq + 1]
        starts.append(start)
    assert length < 60 or len(set(starts)) > 1
    # Another batch size, and a run that goes on, see the same windows.
    again = TrainBatches.create(TokenFile(path, 0, length), seq, 1, seed=seed, shuffle=False, shift=True)
    assert [again.next()[0][0].tolist() for _ in range(count + 1)] == [row[:-1] for row in seen[: count + 1]]
    resumed = TrainBatches.create(TokenFile(path, 0, length), seq, 1, seed=0, shuffle=False, shift=True)
    resumed.load_state_dict(again.state_dict())
    assert np.array_equal(resumed.next()[0], again.next()[0])


@given(length=st.integers(2, 500), seq=st.integers(1, 40), rows=st.integers(1, 9), seed=st.integers(0, 5))
def test_an_epoch_of_training_is_every_window_once(stored, length, seq, rows, seed):
    path, ids = stored
    ids = ids[:length]
    windows = []
    while len(windows) * seq + seq + 1 <= length:
        windows.append(ids[len(windows) * seq : len(windows) * seq + seq + 1])
    tokens = TokenFile(path, 0, length)
    assert window_count(length, seq) == len(windows)
    if len(windows) < rows:
        with pytest.raises(ConfigError):
            TrainBatches.create(tokens, seq, rows, seed=seed)
        return
    batches = TrainBatches.create(tokens, seq, rows, seed=seed)
    assert batches.windows == len(windows)
    seen = []
    for _ in range(len(windows)):
        inputs, labels = batches.next()
        assert inputs.shape == labels.shape == (rows, seq) and inputs.dtype == labels.dtype == np.int32
        assert inputs.flags.c_contiguous and labels.flags.c_contiguous
        seen += [[*x.tolist(), y[-1]] for x, y in zip(inputs, labels)]
        np.testing.assert_array_equal(inputs[:, 1:], labels[:, :-1])
    order = ResumableSampler(len(windows), seed).next(len(seen))
    assert seen == [windows[i] for i in order]


@given(length=st.integers(0, 500), seq=st.integers(1, 40), rows=st.integers(1, 9), limit=st.none() | st.integers(0, 4))
def test_evaluation_counts_every_token_once_in_batches_of_one_shape(stored, length, seq, rows, limit):
    path, ids = stored
    start = 500 - length
    ids, per_batch = ids[start:], rows * seq
    found = list(eval_batches(TokenFile(path, start), seq, rows, limit))
    labels_in_all = max(0, length - 1)
    whole = -(-labels_in_all // per_batch)
    assert len(found) == (whole if limit is None else min(limit, whole))
    pairs = []
    for inputs, labels in found:
        assert inputs.shape == labels.shape == (rows, seq) and inputs.dtype == labels.dtype == np.int32
        pairs += [(x, y) for x, y in zip(inputs.ravel().tolist(), labels.ravel().tolist()) if y != IGNORED]
    counted = labels_in_all if limit is None else min(labels_in_all, limit * per_batch)
    assert pairs == list(zip(ids, ids[1:]))[:counted]


def test_padding_is_token_zero_and_ignored(stored):
    path, _ = stored
    inputs, labels = list(eval_batches(TokenFile(path, 0, 6), 4, 3))[-1]
    assert (labels != IGNORED).sum() == 5
    assert inputs[labels == IGNORED].tolist() == [0] * 7


def test_resuming_gives_the_batches_that_would_have_come(stored):
    path, _ = stored
    through = TrainBatches.create(TokenFile(path), 10, 8, seed=3)
    for _ in range(11):  # 49 windows: well into the second epoch
        through.next()
    state = json.loads(json.dumps(through.state_dict()))
    again = TrainBatches.create(TokenFile(path), 10, 8, seed=3)
    again.load_state_dict(state)
    fewer_rows = TrainBatches.create(TokenFile(path), 10, 4, seed=3)
    fewer_rows.load_state_dict(state)
    for _ in range(9):
        expected = through.next()
        np.testing.assert_array_equal(again.next(), expected)
        halves = [fewer_rows.next(), fewer_rows.next()]
        np.testing.assert_array_equal(np.concatenate(halves, axis=1), expected)


def test_a_position_in_other_windows_is_refused(stored):
    path, _ = stored
    state = TrainBatches.create(TokenFile(path), 10, 8, seed=3).state_dict()
    with pytest.raises(CheckpointError, match="windows of 10 tokens and model.seq is 20"):
        TrainBatches.create(TokenFile(path), 20, 8, seed=3).load_state_dict(state)
    with pytest.raises(CheckpointError, match="49 windows, the text now has 39"):
        TrainBatches.create(TokenFile(path, 100), 10, 8, seed=3).load_state_dict(state)


def test_too_short_a_text_is_refused_with_the_numbers(stored):
    path, _ = stored
    with pytest.raises(ConfigError, match="500 tokens, and one window of `model.seq` = 500 needs 501") as caught:
        TrainBatches.create(TokenFile(path), 500, 1, seed=0)
    assert caught.value.key == "model.seq"
    assert TrainBatches.create(TokenFile(path), 499, 1, seed=0).windows == 1
    with pytest.raises(ConfigError, match="4 windows of 100; one global batch needs 5"):
        TrainBatches.create(TokenFile(path), 100, 5, seed=0)


def test_a_model_needs_a_row_for_every_id():
    check_vocab(257, 257)
    check_vocab(50308, 50257)
    with pytest.raises(ConfigError, match="256 embeddings, the tokenizer makes ids up to 256") as caught:
        check_vocab(256, 257)
    assert caught.value.key == "model.vocab"
