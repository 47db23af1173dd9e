"""Attention scores and readouts at the start, against their formulas."""
from __future__ import annotations

import pytest
import torch

from ipu_lean.sweep.coord.signature import signature_of
from tests.sweep.coord.architectures import BASE, MLP, RESIDUAL, REVERSIBLE_TIED, Architecture


@pytest.mark.parametrize("architecture", [RESIDUAL, REVERSIBLE_TIED, MLP], ids=lambda found: found.name)
@pytest.mark.parametrize("width", [32, 128])
def test_a_readout_gives_the_root_of_its_fan_in_times_its_multiplier(architecture: Architecture, width: int) -> None:
    found = signature_of(architecture.rig().build(width, 0), architecture.batch(0)[0], width, 0)
    assert found.readout_fan_in == width
    assert found.readout == pytest.approx(width**0.5 * BASE / width, rel=0.15)


@pytest.mark.parametrize("heads", [{"heads": 4}, {"heads": None, "head_size": 8}])
@pytest.mark.parametrize("width", [32, 128])
def test_scores_have_the_size_that_random_queries_and_keys_give_them(width: int, heads: dict) -> None:
    architecture = Architecture("any", {**RESIDUAL.model, **heads})
    model = architecture.rig().build(width, 0)
    attention = model.layers.blocks[0].branches[0].attention
    found = signature_of(model, architecture.batch(0)[0], width, 0)
    assert found.head_size == (width // 4 if heads["heads"] else 8)
    assert len(found.scores) == 2
    # q and k have entries of variance 1, so a product of head_size of them has standard deviation sqrt(head_size).
    expected = attention.scale * found.head_size**0.5
    assert all(value == pytest.approx(expected, rel=0.15) for value in found.scores.values())


def test_drawing_is_seeded_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    inputs = RESIDUAL.batch(0)[0]
    one, two, other = (signature_of(RESIDUAL.rig().build(32, 0), inputs, 32, seed) for seed in (0, 0, 1))
    assert one == two and one.scores != other.scores
    assert torch.equal(before, torch.get_rng_state())
