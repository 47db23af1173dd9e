"""Traces made by hand: distances, limits, what is left out, which difference is named first."""

from __future__ import annotations

import math
from typing import Any, Dict

import pytest
import torch

from ipu_lean.errors import ConfigError
from ipu_lean.parity.compare import compare, measure
from ipu_lean.parity.trace import Start, Trace

pytestmark = pytest.mark.pod
NAMES = ("early", "late", "noise")
SIZES = {"early": 40, "late": 40, "noise": 4}


def start(**changes: Any) -> Start:
    batches = torch.arange(4 * 2 * 3, dtype=torch.int32).reshape(4, 2, 3)
    values: Dict[str, Any] = {
        "weights": {name: torch.ones(SIZES[name]) for name in NAMES}, "tokens": batches, "labels": batches + 1, "drawn": [],
        "zero_gradients": ["noise"], "vocab": 30,
    }
    return Start(**{**values, **changes})


def side(begin: Any = None, **changes: Any) -> Trace:
    trace = Trace({"device": "cpu", "precision": "fp32", "optimizer": "adamw", "backend": "none", "gradients": "hand"},
                  begin or start(), 1)
    trace.losses = [4.0, 3.0, 2.0, 1.0]
    trace.activations = {"first": torch.ones(3), "second": torch.ones(3)}
    trace.gradients = {"early": torch.ones(40), "late": torch.ones(40), "noise": torch.full((4,), 1e-9)}
    trace.weights = {step: {name: torch.full((SIZES[name],), float(step)) for name in NAMES} for step in (1, 2, 4)}
    for name, value in changes.items():
        setattr(trace, name, value)
    return trace


def test_a_distance_by_hand() -> None:
    row = measure("weight", 3, "w", torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), 0.2)
    assert row.relative == pytest.approx(0.1) and row.max_abs == 0.5 and row.status == "ok"
    assert row.cosine == pytest.approx((9 + 18) / (5 * math.sqrt(9 + 20.25)))
    assert row.ratio == pytest.approx(math.sqrt(29.25) / 5)
    assert measure("weight", 3, "w", torch.zeros(2), torch.ones(2), 0.2).relative == math.inf
    assert measure("weight", 3, "w", torch.zeros(2), torch.zeros(2), 0.2).relative == 0.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_differ(bad: float) -> None:
    assert measure("loss", 1, "loss", torch.tensor([1.0]), torch.tensor([bad]), 1e9).status == "differs"
    assert compare(side(), side(losses=[4.0, 3.0, bad, 1.0])).verdict == "fail"


def test_equal_traces_pass() -> None:
    found = compare(side(), side())
    assert (found.verdict, found.first) == ("pass", None)
    assert found.named("zero") == ["noise"] and found.named("left out") == ["noise"]


def test_activations_come_first_and_in_forward_order() -> None:
    wrong = side(activations={"first": torch.ones(3), "second": torch.full((3,), 1.1)}, losses=[5.0, 3.0, 2.0, 1.0])
    wrong.gradients = {**wrong.gradients, "early": -torch.ones(40)}
    found = compare(side(), wrong)
    assert (found.verdict, found.first.kind, found.first.name) == ("fail", "activation", "second")
    assert "`second`" in found.diagnosis


def test_gradients_are_named_in_backward_order() -> None:
    wrong = side()
    wrong.gradients = {"early": torch.full((40,), 2.0), "late": torch.full((40,), 3.0), "noise": wrong.gradients["noise"]}
    assert compare(side(), wrong).first.name == "late"


def test_a_lost_gradient_is_told_from_a_wrong_one() -> None:
    wrong = side()
    wrong.gradients = {**wrong.gradients, "early": torch.zeros(40)}
    found = compare(side(), wrong)
    assert found.first.name == "early" and "never arrives" in found.diagnosis


def test_one_factor_on_all_gradients_points_at_the_mean() -> None:
    wrong = side(gradients={name: tensor * 1.25 for name, tensor in side().gradients.items()})
    assert "every gradient is 1.25 times" in compare(side(), wrong).diagnosis


def test_the_first_step_is_named() -> None:
    assert compare(side(), side(losses=[4.0, 3.0, 2.1, 1.5])).first.step == 3
    wrong = side()
    wrong.weights = {**wrong.weights, 2: {**wrong.weights[2], "late": torch.full((40,), 2.1)}}
    found = compare(side(), wrong)
    assert (found.first.kind, found.first.step, found.first.name) == ("weight", 2, "late") and "schedule" in found.diagnosis


def test_a_gradient_that_is_zero_in_truth_is_compared_absolutely() -> None:
    wrong = side()
    wrong.gradients = {**wrong.gradients, "noise": torch.full((4,), -3e-9)}
    assert compare(side(), wrong).verdict == "pass"
    wrong.gradients = {**wrong.gradients, "noise": torch.full((4,), 1e-3)}
    found = compare(side(), wrong)
    assert (found.verdict, found.first.name) == ("fail", "noise")


def test_a_muted_gradient_proves_nothing() -> None:
    quiet = {**side().gradients, "early": torch.zeros(40)}
    found = compare(side(gradients=quiet), side(gradients=quiet))
    assert found.verdict == "inconclusive" and found.named("muted") == ["early"] and "early" in found.diagnosis


def test_what_rounding_moves_is_not_judged() -> None:
    begin = start(weights={**start().weights, "late": torch.ones(4000)})
    wrong = side(begin)
    wrong.weights = {**wrong.weights, 2: {**wrong.weights[2], "early": torch.full((40,), 2.1)}}
    assert compare(side(begin), wrong).verdict == "fail"
    spread = {2: {"early": 1e-3, "late": 1e-9}}
    found = compare(side(begin, spread=spread), wrong)
    assert found.verdict == "pass" and "early" in found.named("left out")
    # Below the limit the weight is judged, and ten times what rounding does anywhere in the run is allowed.
    wrong.weights = {**wrong.weights, 2: {**wrong.weights[2], "early": torch.full((40,), 2 * (1 + 5e-5))}}
    assert compare(side(begin, spread={1: {"early": 1e-9}, 2: {"early": 1e-9}, 4: {"early": 9e-6}}), wrong).verdict == "pass"
    assert compare(side(begin, spread={2: {"early": 4e-6}}), wrong).verdict == "fail"


def test_too_much_left_out_proves_nothing() -> None:
    spread = {2: dict.fromkeys(NAMES, 1.0)}
    assert compare(side(spread=spread), side()).verdict == "inconclusive"


def test_a_coarser_candidate_rounds_in_proportion() -> None:
    half = side(facts={**side().facts, "precision": "fp16-ipu"})
    half.weights = {**half.weights, 4: {**half.weights[4], "early": torch.full((40,), 4.15)}}
    assert compare(side(), half).verdict == "pass"  # 4 %
    half.weights[4]["early"] = torch.full((40,), 4.3)
    assert compare(side(), half).verdict == "fail"
    assert compare(side(spread={4: {"early": 1e-6}}), half).verdict == "pass"  # 10 x 1e-6 x 2^13 = 8 %


def test_limits_can_be_changed() -> None:
    wrong = side(losses=[4.1, 3.0, 2.0, 1.0])
    assert compare(side(), wrong).verdict == "fail" and compare(side(), wrong, {"loss": 0.1}).verdict == "pass"


@pytest.mark.parametrize(("change", "says"), [
    ({"weights": {"early": torch.ones(40), "late": torch.ones(40)}}, "noise"),
    ({"weights": {name: torch.ones(5) for name in NAMES}}, "is [40] and [5]"),
    ({"weights": {name: torch.full((SIZES[name],), 1.5) for name in NAMES}}, "`early` differs before the first update"),
    ({"tokens": torch.zeros(4, 2, 3, dtype=torch.int32)}, "the tokens differ"),
    ({"labels": torch.zeros(4, 2, 2, dtype=torch.int32)}, "the labels differ"),
])
def test_both_sides_begin_alike(change: Dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        compare(side(), side(start(**change)))
    assert says in str(error.value)


def test_a_missing_tensor_differs() -> None:
    wrong = side()
    del wrong.activations["second"]
    assert compare(side(), wrong).first.name == "second"


def test_plain_json() -> None:
    import json

    text = json.dumps(compare(side(), side(losses=[float("nan")] * 4)).as_dict(), allow_nan=False)
    assert json.loads(text)["first"]["relative"] == "nan"
