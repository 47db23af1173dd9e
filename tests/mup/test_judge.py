"""The judge on figures that follow known power laws."""
from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict

import pytest
import torch

from ipu_lean.mup.diagnosis import diagnose, diagnose_depth
from ipu_lean.mup.figures import BRANCH, STREAM, Coordinate, Figures, scatter_of, slope_of
from ipu_lean.mup.judge import judge, judge_depth, judged_steps
from ipu_lean.mup.verdict import FAIL, INCONCLUSIVE, PASS, Verdict, overall
from tests.mup.made import figures


def named(verdicts: Any) -> Dict[str, Verdict]:
    return {verdict.name: verdict for verdict in verdicts}


def test_figures_as_mup_prescribes_them_pass_every_question() -> None:
    control = figures(change={"stack": 1.0})
    verdicts = named(judge(figures(seeds=3), control))
    assert overall(verdicts.values()) == PASS
    assert list(verdicts) == ["update sizes", "rates during the run", "initialisation", "attention scores", "readout multiplier",
                              "values at the start", "activation changes", "weight decay"]  # fmt: skip


@pytest.mark.parametrize(
    "question, change, number",
    [
        ("update sizes", {"update": {"layers.0.up.weight": 0.0}}, 1.0),
        ("update sizes", {"update": {"embedding.weight": -0.5}}, 0.5),
        ("update sizes", {"update": {"norm.weight": -1.0}}, 1.0),
        ("rates during the run", {"last_rate": {"layers.0.up.weight": 0.0}}, 1.0),
        ("initialisation", {"start": {"layers.0.down.weight": 0.0}}, 0.5),
        ("initialisation", {"start": {"embedding.weight": -0.5}}, 0.5),
        ("attention scores", {"scores": 0.0}, 0.5),
        ("attention scores", {"head_size": lambda w: 16}, 0.5),
        ("readout multiplier", {"readout": 0.5}, 1.0),
        ("values at the start", {"values": {"layer0.attention": -1.0}}, 1.0),
        ("activation changes", {"change": {"stack": 0.5}}, 0.5),
        ("activation changes", {"change": {"head": 0.75}}, 0.75),
        ("weight decay", {"decay": -1.0}, 1.0),
    ],
)
def test_a_wrong_power_fails_its_own_question_with_its_number(question: str, change: Dict[str, Any], number: float) -> None:
    verdicts = named(judge(figures(**change)))
    assert verdicts[question].status == FAIL
    assert verdicts[question].number == pytest.approx(number, abs=1e-9)
    others = {name for name, verdict in verdicts.items() if verdict.status != PASS} - {question}
    assert not others, others


@pytest.mark.parametrize("rows, power, status", [(4, -0.25, PASS), (400, -0.25, FAIL), (4, -0.5, FAIL)])
def test_a_small_table_scatters_by_chance(rows: int, power: float, status: str) -> None:
    """Axial positions have a few rows: a slope of a quarter is chance there, half a power is not."""
    found = figures()
    for width in (32, 64, 128):
        made = replace(found.tensors[0], size=width, name="rows", shape=(rows, 1, width // 4), init=width**power)
        found.tensors.append(replace(made, first=1.0, rate=1.0, rate_built=1.0, decay=0.01))
    assert named(judge(found))["initialisation"].status == status


def test_what_chance_alone_gives() -> None:
    """The slope's spread over many draws of a table is the standard error that is allowed for."""
    generator = torch.Generator().manual_seed(0)
    slopes = []
    for _ in range(300):
        rows = [replace(figures().tensors[0], size=width, shape=(4, width // 4)) for width in (32, 64, 128)]
        rows = [replace(row, init=float(torch.randn(row.shape, generator=generator).square().mean().sqrt())) for row in rows]
        slopes.append(slope_of(rows, lambda row: row.init))
    assert torch.tensor(slopes).std().item() == pytest.approx(scatter_of(rows), rel=0.15)


def test_heads_that_keep_their_size_must_have_scores_that_keep_theirs() -> None:
    verdicts = named(judge(figures(scores=0.0, head_size=lambda w: 16)))
    assert verdicts["attention scores"].status == PASS


@pytest.mark.parametrize("power, status", [(0.19, PASS), (0.3, INCONCLUSIVE), (0.41, FAIL), (-0.3, PASS), (-0.5, INCONCLUSIVE)])
def test_growth_fails_what_may_be_noise_is_open_and_features_that_fade_do_not_pass(power: float, status: str) -> None:
    assert named(judge(figures(change={"stack": power})))["activation changes"].status == status


def test_an_output_that_fades_is_allowed_since_a_random_readout_does() -> None:
    assert named(judge(figures(change={"head": -0.5})))["activation changes"].status == PASS


def test_a_module_that_never_changes_fails() -> None:
    verdict = named(judge(figures(change={"embed": None})))["activation changes"]
    assert verdict.status == FAIL and "embed" in verdict.text


def test_without_contrast_to_the_standard_parametrisation_nothing_is_shown() -> None:
    verdict = named(judge(figures(), control=figures(change={"stack": 0.1})))["activation changes"]
    assert verdict.status == INCONCLUSIVE and "no contrast" in verdict.text


def test_a_loss_that_is_not_finite_fails() -> None:
    broken = figures()
    broken.diverged.append((256, 0, 3))
    verdict = named(judge(broken))["activation changes"]
    assert verdict.status == FAIL and "256" in verdict.text
    control = figures()
    control.diverged.append((256, 0, 3))
    assert named(judge(figures(), control))["activation changes"].status == PASS  # a control that explodes is contrast enough


def test_under_sgd_learning_rates_are_judged_by_musgds_table() -> None:
    growing = dict.fromkeys(("embedding.weight", "readout.weight", "norm.weight", "layers.0.up.bias"), 1.0)
    rate = {**growing, "layers.0.up.weight": 0.0, "layers.0.down.weight": 0.0}
    assert named(judge(figures(family="sgd", rate=rate)))["update sizes"].status == PASS
    assert named(judge(figures(family="sgd", rate=dict.fromkeys(rate, 0.0))))["update sizes"].status == FAIL


def test_steps_that_are_judged() -> None:
    assert judged_steps(range(17)) == [4, 8, 16]
    assert judged_steps(range(11)) == [4, 8, 10]
    assert judged_steps([0, 1, 2]) == [2]


def deep(branch: float, stream: float) -> Figures:
    found = Figures(axis="depth")
    for depth in (2, 4, 8, 16):
        for step in (0, 4, 8):
            for module, role, start, power in (("layer0.a", BRANCH, branch, branch), ("stack", STREAM, 0.0, stream)):
                moved = depth**power if step else 0.0
                found.coordinates.append(Coordinate(depth, 0, step, module, role, 1.0, depth**start, moved, moved, moved))
    return found


@pytest.mark.parametrize(
    "branch, stream, statuses",
    [(-1.0, 0.0, [PASS, PASS]), (0.0, 1.0, [FAIL, FAIL]), (-0.5, 0.1, [FAIL, PASS]), (-1.0, 0.3, [PASS, INCONCLUSIVE])],
)
def test_over_depth_branches_fade_and_their_sum_does_not_grow(branch: float, stream: float, statuses: list) -> None:
    assert [verdict.status for verdict in judge_depth(deep(branch, stream), deep(0.0, 1.0))] == statuses


def test_over_depth_too_a_control_without_growth_shows_nothing() -> None:
    assert judge_depth(deep(-1.0, 0.0), deep(0.0, 0.1))[1].status == INCONCLUSIVE


def at_two(found: Figures) -> Figures:
    """The same figures without the smallest size."""
    small = min(found.sizes)
    return replace(
        found,
        tensors=[row for row in found.tensors if row.size > small],
        coordinates=[row for row in found.coordinates if row.size > small],
        signatures=[row for row in found.signatures if row.size > small],
    )


@pytest.mark.parametrize("change", [{"values": {"layer0.attention": 0.35}}, {"change": {"stack": 0.6}}, {}])
def test_two_widths_show_no_trend_of_activations(change: Dict[str, Any]) -> None:
    """Sound models reach +0.35 there by chance; a fault that is named must not rest on it."""
    two = at_two(figures(**change))
    verdicts = named(judge(two, figures(change={"stack": 1.0})))
    for question in ("values at the start", "activation changes"):
        assert verdicts[question].status == INCONCLUSIVE and "give three widths or more" in verdicts[question].text
    assert {one.status for name, one in verdicts.items() if name not in ("values at the start", "activation changes")} == {PASS}
    assert diagnose(two) == []


def test_what_is_exact_fails_at_two_widths_too() -> None:
    lost = at_two(figures(update={"layers.0.up.weight": 0.0}))
    assert named(judge(lost))["update sizes"].status == FAIL
    assert [found.code for found in diagnose(lost)] == ["lost-lr-group"]
    still = at_two(figures(change={"embed": None, "stack": 0.6}))
    verdict = named(judge(still))["activation changes"]
    assert verdict.status == FAIL and "embed" in verdict.text and [found.code for found in diagnose(still)] == ["frozen"]


def test_two_depths_show_no_trend_either() -> None:
    two = at_two(at_two(deep(0.0, 1.0)))
    assert [verdict.status for verdict in judge_depth(two, deep(0.0, 1.0))] == [INCONCLUSIVE, INCONCLUSIVE]
    assert "give three depths or more" in judge_depth(two)[1].text and diagnose_depth(two) == []
