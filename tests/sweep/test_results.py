"""Results on disk: equal after a round trip, whole or absent, whatever the numbers are."""

from __future__ import annotations

import json
import math

import pytest

from ipu_lean.sweep.results import Store, TrialResult, final_loss

pytestmark = pytest.mark.pod


def result(name="0123456789ab", **changes):
    values = {"axes": {"width": 32, "lr": 0.1}, "status": "done", "losses": [5.0, 4.5, 0.1 + 0.2], "loss": 0.1 + 0.2}
    return TrialResult(name, **{**values, **changes})


def test_a_result_survives_json_bit_for_bit():
    one = result(valid={"valid": 1 / 3}, seconds=1.5, executor="local", error=None)
    assert TrialResult.from_json(json.loads(json.dumps(one.as_json()))) == one


def test_numbers_that_are_not_finite_survive_standard_json():
    one = result(status="diverged", losses=[5.0, math.inf, -math.inf, math.nan], loss=math.inf, error="step 2")
    text = json.dumps(one.as_json(), allow_nan=False)
    back = TrialResult.from_json(json.loads(text))
    assert back.losses[:3] == [5.0, math.inf, -math.inf] and math.isnan(back.losses[3]) and back.loss == math.inf


def test_the_final_loss_is_a_mean_over_the_last_share():
    losses = [10.0] * 90 + [1.0, 2.0] * 5
    assert final_loss(losses, 0.1) == 1.5
    assert final_loss([3.0, 2.0], 0.1) == 2.0
    assert final_loss([3.0, 2.0], 1.0) == 2.5


def test_the_store_keeps_one_whole_file_a_trial(tmp_path):
    store = Store(tmp_path)
    assert store.done_ids() == set() and store.get("a" * 12) is None
    store.add(result("a" * 12))
    store.add(result("b" * 12, status="failed", error="the disk is full"))
    assert store.done_ids() == {"a" * 12, "b" * 12}
    assert store.done_ids(retry=True) == {"a" * 12}
    assert [one.id for one in store.results(["b" * 12, "c" * 12, "a" * 12])] == ["b" * 12, "a" * 12]
    assert sorted(path.name for path in (tmp_path / "trials").iterdir()) == ["a" * 12 + ".json", "b" * 12 + ".json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"id": "x"}', "null"])
def test_a_file_that_is_no_result_counts_as_none(tmp_path, text):
    store = Store(tmp_path)
    store.add(result())
    (store.directory / "0123456789ab.json").write_text(text)
    assert store.get("0123456789ab") is None and store.done_ids() == set()
