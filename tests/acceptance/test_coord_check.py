"""The coordinate check in full: every fault on every architecture that carries it, and ten seeds of sound networks."""
from __future__ import annotations

import pytest
import torch

from ipu_lean.mup.diagnosis import diagnose
from ipu_lean.mup.judge import judge
from ipu_lean.mup.verdict import FAIL, overall
from ipu_lean.sweep.coord.capture import measure
from tests.sweep.coord.architectures import ALL, STEPS, WIDTHS, Architecture
from tests.sweep.coord.faults import FAULTS
from tests.sweep.coord.test_faults import control_of

torch.set_num_threads(1)
GRID = [
    pytest.param(fault, architecture, id=f"{fault.name}-{architecture.name}")
    for fault in FAULTS.values()
    for architecture in ALL
    if fault.carried_by(architecture)
]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("lr", [3e-3, 1e-2])
@pytest.mark.parametrize("fault, architecture", GRID)
def test_every_fault_is_rejected_by_its_name(fault, architecture, lr: float, seed: int) -> None:
    figures = measure(fault.make(architecture, lr, seed), WIDTHS, STEPS, 1)
    assert overall(judge(figures, control_of(architecture, lr))) == FAIL
    assert [found.code for found in diagnose(figures)] == [fault.code]


@pytest.mark.parametrize("lr", [3e-3, 1e-2])
@pytest.mark.parametrize("architecture", ALL, ids=lambda found: found.name)
def test_no_seed_of_ten_rejects_a_sound_network(architecture: Architecture, lr: float) -> None:
    rejected = {}
    for seed in range(10):
        figures = measure(architecture.rig(lr, 100 * seed), WIDTHS, STEPS, 1)
        verdicts = judge(figures, control_of(architecture, lr))
        if overall(verdicts) == FAIL or diagnose(figures):
            rejected[seed] = [verdict for verdict in verdicts if verdict.status == FAIL]
    assert not rejected
