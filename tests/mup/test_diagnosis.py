"""Diagnoses of figures that follow known power laws. (Networks that are really broken: tests/sweep/coord/test_faults.py.)"""
from __future__ import annotations

from typing import Any, Dict

import pytest

from ipu_lean.mup.diagnosis import diagnose, diagnose_depth
from tests.mup.made import TENSORS, figures
from tests.mup.test_judge import deep

HIDDEN = [name for name, (_, label, _, _) in TENSORS.items() if label == "hidden"]
FLAT = dict.fromkeys(HIDDEN, 0.0)


@pytest.mark.parametrize(
    "codes, change",
    [
        ([], {}),
        (["lost-lr-groups"], {"update": FLAT}),
        (["lost-lr-group"], {"update": {HIDDEN[0]: 0.0}}),
        (["no-base"], {"update": FLAT, "readout": 0.5, "scores": 0.0}),
        (["flattened-schedule"], {"update": FLAT, "rate": dict.fromkeys(HIDDEN, -1.0), "last_rate": FLAT}),
        (["scaled-twice"], {"update": dict.fromkeys(HIDDEN, -2.0)}),
        (["wrong-lr-group"], {"update": {"embedding.weight": -1.0}}),
        (["eps-too-large"], {"update": {name: power - 0.4 for name, (_, _, _, power) in TENSORS.items()},
                             "rate": {name: power for name, (_, _, _, power) in TENSORS.items()}}),
        (["no-readout-multiplier"], {"readout": 0.5, "change": {"head": 0.7}}),
        (["constant-init"], {"start": {HIDDEN[0]: 0.0}, "values": {"stack": 0.5}}),
        (["fan-in-init"], {"start": {"embedding.weight": -0.5}}),
        (["growing-embedding"], {"start": {"embedding.weight": 0.5}}),
        (["sqrt-attention"], {"scores": 0.0}),
        (["fixed-head-attention"], {"head_size": lambda w: 16}),
        (["width-dependent-multiplier"], {"values": {"layer0.attention": -1.0}}),
        (["decay-not-compensated"], {"decay": -1.0}),
        (["unexplained-growth"], {"change": {"stack": 0.6}}),
        (["frozen"], {"change": {"embed": None}}),
        (["sqrt-attention", "decay-not-compensated"], {"scores": 0.0, "decay": -1.0}),
    ],
)  # fmt: skip
def test_a_pattern_is_named_once_and_two_faults_are_two(codes: list, change: Dict[str, Any]) -> None:
    found = diagnose(figures(**change))
    assert [each.code for each in found] == codes
    assert all(each.text and each.text[-1] not in ".?" or each.text.endswith("?") for each in found)


def test_a_base_that_moves_differs_from_no_base_by_a_constant_multiplier() -> None:
    moving = figures(update=FLAT, readout=0.5)
    moving.tensors = [
        row if row.label != "hidden" else type(row)(**{**row.__dict__, "first": row.first / 2}) for row in moving.tensors
    ]
    assert [each.code for each in diagnose(moving)] == ["moving-base"]
    assert "2 at every width" in diagnose(moving)[0].text


def test_without_any_zero_start_it_is_the_standard_parametrisation() -> None:
    plain = figures(update=FLAT, readout=0.5, start={"readout.weight": -0.5, "layers.0.up.bias": None})
    assert [each.code for each in diagnose(plain)] == ["standard-parametrization"]


def test_under_sgd_lost_groups_are_seen_in_everything_but_hidden_matrices() -> None:
    assert [each.code for each in diagnose(figures(family="sgd", rate=dict.fromkeys(TENSORS, 0.0)))] == ["lost-lr-groups"]


def test_over_depth() -> None:
    assert diagnose_depth(deep(-1.0, 0.0)) == []
    assert [each.code for each in diagnose_depth(deep(0.0, 1.0))] == ["wrong-depth-multiplier"]
    assert [each.code for each in diagnose_depth(deep(-1.0, 0.6))] == ["unexplained-growth"]
