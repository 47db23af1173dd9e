"""Hidden tokens: how many, which, what stands in their place, and that none of it depends on how the rows are grouped."""
from __future__ import annotations

from pathlib import Path
from typing import Any, List

import numpy as np
import pytest

from ipu_lean.data.masked import VALIDATION, MaskedBatches, Masking, check_whole_window, masked_eval_batches
from ipu_lean.data.tokens import TokenFile
from ipu_lean.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.pod
VOCAB, SEQ = 50, 24
MASKING = Masking(VOCAB, 0.25)


def text(folder: Path, tokens: int) -> TokenFile:
    """A token file in which every token occurs."""
    ids = np.random.RandomState(1).randint(0, VOCAB, tokens).astype("<u2")
    (folder / "text.u16").write_bytes(ids.tobytes())
    return TokenFile(folder / "text.u16")


def stream(folder: Path, rows: int, seed: int = 7, **options: Any) -> MaskedBatches:
    return MaskedBatches.create(text(folder, 10 * SEQ + 1), SEQ, rows, MASKING, seed=seed, **options)


def rows_of(batches: MaskedBatches, count: int) -> List[Any]:
    """The first rows of a stream, one by one."""
    found: List[Any] = []
    while len(found) < count:
        inputs, labels = batches.next()
        assert inputs.dtype == labels.dtype == np.int32 and inputs.shape == labels.shape == (batches.rows, SEQ)
        found += list(zip(inputs.tolist(), labels.tolist()))
    return found[:count]


def test_labels_are_the_hidden_tokens_and_nothing_else_changes(tmp_path):
    batches = MaskedBatches.create(text(tmp_path, 10 * SEQ + 1), SEQ, 10, MASKING, seed=7, shuffle=False)
    original = text(tmp_path, 10 * SEQ + 1).read(0, 10 * SEQ).reshape(10, SEQ)
    inputs, labels = batches.next()
    chosen = labels >= 0
    assert (chosen.sum(1) == 6).all()  # a quarter of 24, in every window
    assert np.array_equal(labels[chosen], original[chosen]) and (labels[~chosen] == -100).all()
    assert np.array_equal(inputs[~chosen], original[~chosen])
    assert inputs.min() >= 0 and inputs.max() == VOCAB  # the mask is the one id beyond the tokenizer's
    assert (inputs[chosen] == VOCAB).any()


def test_of_the_chosen_eight_tenths_are_masked_and_one_tenth_is_another_token():
    windows = np.random.RandomState(2).randint(0, VOCAB, (2000, SEQ)).astype(np.int32)
    inputs, labels = MASKING.apply(windows, np.arange(2000), [1, 2])
    chosen = labels >= 0
    count = chosen.sum()
    hidden, same = (inputs == VOCAB)[chosen].sum(), (inputs == windows)[chosen].sum()
    # A random token is the same by chance once in VOCAB. Three standard deviations of 12,000 draws.
    assert hidden / count == pytest.approx(0.8, abs=0.011)
    assert same / count == pytest.approx(0.1 + 0.1 / VOCAB, abs=0.0085)
    other = inputs[chosen & (inputs != VOCAB) & (inputs != windows)]
    assert len(np.unique(other)) == VOCAB
    assert chosen.mean(0) == pytest.approx(np.full(SEQ, 0.25), abs=0.03)  # no place is preferred


def test_a_row_is_what_its_place_in_the_stream_makes_it(tmp_path):
    """Drawn row by row from RandomState itself, in plain Python."""
    masking, windows = Masking(VOCAB, 0.1), np.random.RandomState(3).randint(0, VOCAB, (3, SEQ)).astype(np.int32)
    places = [5, 2**32 + 1, 0]
    inputs, labels = masking.apply(windows, np.array(places), [1, 9])
    for row, place in enumerate(places):
        draws = np.random.RandomState([1, 9, place % 2**32, place // 2**32]).random_sample((3, SEQ))
        wanted, answers = windows[row].tolist(), [-100] * SEQ
        for token in sorted(range(SEQ), key=lambda token: draws[0, token])[:2]:
            answers[token] = wanted[token]
            if draws[1, token] < 0.8:
                wanted[token] = VOCAB
            elif draws[1, token] < 0.9:
                wanted[token] = int(draws[2, token] * VOCAB)
        assert inputs[row].tolist() == wanted and labels[row].tolist() == answers


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_the_batch_has_no_say_and_a_resumed_stream_goes_on_alike(tmp_path, rows):
    whole = rows_of(stream(tmp_path, 10), 35)  # three and a half epochs
    assert rows_of(stream(tmp_path, rows), 35) == whole
    first = stream(tmp_path, rows)
    seen = rows_of(first, rows * 3)
    other = stream(tmp_path, 2, seed=99)  # a checkpoint brings its seed along
    other.load_state_dict(first.state_dict())
    assert seen + rows_of(other, 35 - len(seen)) == whole


def test_epochs_and_seeds_hide_other_tokens(tmp_path):
    again = stream(tmp_path, 10, shuffle=False)
    one, two = again.next(), again.next()
    other = stream(tmp_path, 10, seed=8, shuffle=False).next()
    places = [(labels >= 0) for _, labels in (one, two, other)]
    for a, b in ((0, 1), (0, 2)):
        assert 0 < (places[a] & places[b]).sum() < places[a].sum() / 2


def test_a_position_with_another_share_is_refused(tmp_path):
    state = stream(tmp_path, 2).state_dict()
    other = MaskedBatches.create(text(tmp_path, 10 * SEQ + 1), SEQ, 2, Masking(VOCAB, 0.3), seed=7)
    with pytest.raises(CheckpointError, match="mask_share"):
        other.load_state_dict(state)
    state["seq"] = 12
    with pytest.raises(CheckpointError, match="windows of 12"):
        stream(tmp_path, 2).load_state_dict(state)


@pytest.mark.parametrize("tokens, rows", [(SEQ, 2), (5 * SEQ, 2), (5 * SEQ + 1, 4), (6 * SEQ - 1, 3)])
def test_a_validation_set_is_read_whole_with_fixed_masks(tmp_path, tokens, rows):
    file = text(tmp_path, tokens)
    flat = file.read(0, tokens)
    batches = list(masked_eval_batches(file, SEQ, rows, MASKING))
    assert all(inputs.shape == labels.shape == (rows, SEQ) for inputs, labels in batches)
    inputs, labels = (np.concatenate(parts) for parts in zip(*batches))
    windows = -(-tokens // SEQ)
    counted = np.zeros(tokens, int)
    for window in range(windows):
        start = min(window * SEQ, tokens - SEQ)
        part = flat[start : start + SEQ]
        chosen = labels[window] >= 0
        counted[start : start + SEQ] += chosen
        assert np.array_equal(labels[window][chosen], part[chosen])
        assert np.array_equal(inputs[window][~chosen], part[~chosen])
        fresh, _ = MASKING.apply(part[None], np.array([window]), [VALIDATION])
        assert np.array_equal(inputs[window][chosen], fresh[0][chosen])
    assert counted.max() == 1 and counted.sum() > 0.15 * tokens
    assert (labels[windows:] == -100).all() and (inputs[windows:] == 0).all()
    assert len(list(masked_eval_batches(file, SEQ, rows, MASKING, limit=1))) == 1


def test_a_set_shorter_than_a_window_is_refused_by_its_name():
    with pytest.raises(ConfigError, match="23") as caught:
        check_whole_window(23, SEQ, "data.validation.valid", 0.1)
    assert caught.value.key == "data.validation.valid"
    check_whole_window(24, SEQ, "data.validation.valid", 0.1)
