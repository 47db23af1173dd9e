"""Networks that are really broken are rejected, with the right name for what is wrong; sound ones are not.

A sample: each fault on one architecture. All of them, and ten seeds: tests/acceptance/test_coord_check.py.
"""
from __future__ import annotations

from typing import Dict, Tuple

import pytest
import torch

from ipu_lean.mup.diagnosis import diagnose, diagnose_depth
from ipu_lean.mup.figures import Figures
from ipu_lean.mup.judge import judge, judge_depth
from ipu_lean.mup.verdict import FAIL, PASS, overall
from ipu_lean.sweep.coord.capture import measure
from ipu_lean.sweep.coord.rig import standard
from tests.sweep.coord.architectures import ALL, MLP, REFORMER, RESIDUAL, REVERSIBLE_TIED, STEPS, THREE, WIDTHS, Architecture
from tests.sweep.coord.faults import FAULTS

torch.set_num_threads(1)
_controls: Dict[Tuple[str, float], Figures] = {}


def control_of(architecture: Architecture, lr: float) -> Figures:
    """The standard parametrisation's figures, measured once."""
    key = (architecture.name, lr)
    if key not in _controls:
        rig = architecture.rig(lr, 0, lambda config, width: standard(config))
        _controls[key] = measure(rig, WIDTHS, STEPS, 1, signatures=False)
    return _controls[key]


def carriers() -> list:
    """Every fault with one architecture that carries it, the three in turn."""
    found = []
    for number, fault in enumerate(FAULTS.values()):
        able = [architecture for architecture in (*THREE, *ALL) if fault.carried_by(architecture)]
        chosen = able[number % min(3, len(able))]
        found.append(pytest.param(fault, chosen, id=f"{fault.name}-{chosen.name}"))
    return found


@pytest.mark.parametrize("fault, architecture", carriers())
def test_a_fault_is_rejected_by_its_name(fault, architecture) -> None:
    figures = measure(fault.make(architecture, 1e-2, 0), WIDTHS, STEPS, 1)
    assert overall(judge(figures, control_of(architecture, 1e-2))) == FAIL
    assert [found.code for found in diagnose(figures)] == [fault.code]


@pytest.mark.parametrize("lr", [3e-3, 1e-2])
@pytest.mark.parametrize("architecture", THREE, ids=lambda found: found.name)
def test_a_sound_network_passes(architecture: Architecture, lr: float) -> None:
    figures = measure(architecture.rig(lr), WIDTHS, STEPS, 2)
    assert overall(judge(figures, control_of(architecture, lr))) == PASS, judge(figures)
    assert diagnose(figures) == []


def test_a_small_rate_makes_small_gradients_of_keys_and_no_fault() -> None:
    figures = measure(RESIDUAL.rig(3e-4), WIDTHS, 4, 1)
    assert {verdict.name: verdict.status for verdict in judge(figures)}["update sizes"] == PASS
    assert diagnose(figures) == []


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("architecture", THREE, ids=lambda found: found.name)
def test_no_single_seed_rejects_a_sound_network(architecture: Architecture, seed: int) -> None:
    figures = measure(architecture.rig(1e-2, 100 * seed), WIDTHS, STEPS, 1)
    assert overall(judge(figures, control_of(architecture, 1e-2))) != FAIL
    assert diagnose(figures) == []


@pytest.mark.parametrize("architecture", [RESIDUAL, REVERSIBLE_TIED], ids=lambda found: found.name)
def test_a_lost_depth_multiplier_is_rejected_and_completep_passes(architecture: Architecture) -> None:
    depths = (2, 4, 8)
    sound = measure(architecture.rig(axis="depth"), depths, 4, 2, signatures=False)
    lost = measure(architecture.rig(axis="depth", mup={"depth_rule": "none"}), depths, 4, 2, signatures=False)
    assert overall(judge_depth(sound, lost)) == PASS, judge_depth(sound, lost)
    assert diagnose_depth(sound) == []
    assert overall(judge_depth(lost)) == FAIL
    assert [found.code for found in diagnose_depth(lost)] == ["wrong-depth-multiplier"]


@pytest.mark.parametrize("lr", [3e-3, 1e-2])
def test_a_sound_reformer_passes(lr: float) -> None:
    """Local and hashed attention in turn, axial positions, both streams side by side."""
    figures = measure(REFORMER.rig(lr), WIDTHS, STEPS, 1)
    control = control_of(REFORMER, lr) if lr == 1e-2 else None
    assert overall(judge(figures, control)) == PASS, judge(figures, control)
    assert diagnose(figures) == []
    assert {name.split(".")[2] for name in figures.signatures[0].scores} == {"0", "1"}  # both kinds were measured


@pytest.mark.parametrize("name", ["standard parametrisation", "1/sqrt(d) attention", "no learning rate groups", "plain readout"])
def test_a_broken_reformer_is_rejected(name: str) -> None:
    """Four updates are enough for these."""
    figures = measure(FAULTS[name].make(REFORMER, 1e-2, 0), WIDTHS, 4, 1)
    assert overall(judge(figures)) == FAIL
    assert [found.code for found in diagnose(figures)] == [FAULTS[name].code]


def test_heads_that_keep_their_size_are_judged_by_their_own_rule() -> None:
    heads = Architecture("heads of 8", {**RESIDUAL.model, "heads": None, "head_size": 8})
    figures = measure(heads.rig(), WIDTHS, 4, 1)
    scores = {verdict.name: verdict for verdict in judge(figures)}["attention scores"]
    assert scores.status == PASS and "+0.00 expected" in scores.text


def test_sgd_is_judged_by_its_own_table() -> None:
    sound = measure(MLP.rig(0.1, kind="sgd", weight_decay=0.0), WIDTHS, 4, 1)
    assert not diagnose(sound)
    assert overall(judge(sound)) != FAIL
    flat = MLP.rig(0.1, kind="sgd", weight_decay=0.0)

    def plain(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": list(model.parameters()), "initial_lr": 0.1}], lr=0.1)

    broken = measure(type(flat)(**{**flat.__dict__, "optimizer": plain}), WIDTHS, 4, 1)
    assert overall(judge(broken)) == FAIL
    assert [found.code for found in diagnose(broken)] == ["lost-lr-groups"]
