"""The order of windows: permutations, repeated exactly from any saved position, under any release of numpy."""
from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ipu_lean.data import ResumableSampler
from ipu_lean.data.sampler import epoch_order
from ipu_lean.errors import CheckpointError

pytestmark = pytest.mark.pod

CALLS = st.lists(st.integers(0, 25), min_size=1, max_size=8)


@given(st.integers(1, 12), st.integers(0, 2**70), st.booleans(), CALLS, CALLS)
def test_a_saved_position_continues_as_if_nothing_had_happened(windows, seed, shuffle, before, after):
    through = ResumableSampler(windows, seed, shuffle)
    expected = [through.next(count).tolist() for count in before + after]
    first = ResumableSampler(windows, seed, shuffle)
    found = [first.next(count).tolist() for count in before]
    state = json.loads(json.dumps(first.state_dict()))
    second = ResumableSampler(windows, seed + 1)
    second.next(3)
    second.load_state_dict(state)
    assert found + [second.next(count).tolist() for count in after] == expected
    assert second.state_dict() == through.state_dict()


@given(st.integers(1, 12), st.integers(0, 2**70), CALLS)
def test_how_many_are_taken_at_a_time_does_not_matter(windows, seed, counts):
    one, many = ResumableSampler(windows, seed), ResumableSampler(windows, seed)
    flat = [number for count in counts for number in many.next(count).tolist()]
    assert flat == [one.next(1)[0] for _ in range(sum(counts))]
    for start in range(0, len(flat) - windows + 1, windows):
        assert sorted(flat[start : start + windows]) == list(range(windows))


def test_without_shuffling_the_order_is_the_text_s():
    assert ResumableSampler(4, seed=9, shuffle=False).next(10).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_epochs_and_seeds_differ():
    orders = [tuple(epoch_order(50, seed, epoch)) for seed in (0, 1, 2**32, 2**32 + 1, 2**64) for epoch in (0, 1, 2)]
    assert len(set(orders)) == len(orders)
    chi = np.zeros((5, 5))
    for epoch in range(2000):
        chi[np.arange(5), epoch_order(5, 7, epoch)] += 1
    assert abs(chi - 400).max() < 100  # each window is at each place about equally often: 5.6 standard deviations


def test_the_order_is_the_same_under_every_numpy():
    """Written down from numpy 1.24 and 2.4, which agree."""
    assert epoch_order(8, 0, 0).tolist() == [3, 7, 4, 0, 2, 6, 5, 1]
    assert epoch_order(8, 0, 1).tolist() == [6, 3, 7, 1, 4, 0, 2, 5]
    assert epoch_order(8, 1, 0).tolist() == [0, 5, 6, 1, 3, 2, 4, 7]
    assert epoch_order(8, 2**40 + 3, 5).tolist() == [4, 6, 3, 5, 2, 0, 7, 1]


def test_a_position_in_another_text_is_refused():
    state = ResumableSampler(10, 0).state_dict()
    with pytest.raises(CheckpointError, match="10 windows, the text now has 11"):
        ResumableSampler(11, 0).load_state_dict(state)
    state["rng"]["generator"] = "dice"
    with pytest.raises(CheckpointError, match="dice"):
        ResumableSampler(10, 0).load_state_dict(state)


def test_millions_of_windows_take_one_array():
    sampler = ResumableSampler(5_000_000, 0)
    sampler.next(3)
    assert sampler._order.nbytes == 4 * 5_000_000
