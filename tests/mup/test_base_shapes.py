"""Base shapes: found on meta, without touching any generator, and every way to get them wrong is refused with a cause."""
from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.mup import base_shapes_from_pair, base_shapes_from_width, finite_base_shapes, shapes_of
from tests.mup.toy import Toy

pytestmark = pytest.mark.pod


def test_width_mode_finds_the_growing_dimensions():
    shapes = base_shapes_from_width(Toy, 16, target_width=64)
    assert shapes["embedding.weight"] == (None, 16)
    assert shapes["blocks.1.up.weight"] == (32, 16)
    assert shapes["blocks.1.down.bias"] == (16,)
    assert shapes["features.weight"] == (16, None)
    assert shapes["head.weight"] == (None, 16)
    assert shapes["head.bias"] == (None,)
    assert list(shapes) == [name for name, _ in Toy(8).named_parameters()]


def test_generators_are_untouched():
    def build(width: int) -> nn.Module:
        random.random()
        np.random.rand()
        torch.rand(3, device="cpu")
        return Toy(width)

    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    base_shapes_from_width(build, 16, target_width=32)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()


def test_base_larger_than_target_is_allowed():
    assert base_shapes_from_width(Toy, 64, target_width=16)["norm.weight"] == (64,)


def test_pair_mode_lets_widths_grow_differently():
    base, delta = shapes_of(Toy(16, ffn=24)), shapes_of(Toy(32, ffn=120))
    assert base_shapes_from_pair(base, delta, shapes_of(Toy(64, ffn=48)))["blocks.0.up.weight"] == (24, 16)


def test_nothing_grows_is_not_mup():
    shapes = shapes_of(Toy(16))
    with pytest.raises(ConfigError, match="nothing grows"):
        base_shapes_from_pair(shapes, shapes)
    with pytest.raises(ConfigError, match="nothing grows"):
        base_shapes_from_width(lambda width: Toy(16), 16)
    assert set(finite_base_shapes(shapes)["norm.weight"]) == {None}


class Odd(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)


@pytest.mark.parametrize("inner", [lambda w: w + 8, lambda w: 2 * w + 1, lambda w: w - 1, lambda w: 64 * (1 + w // 40)])
def test_growth_out_of_proportion_is_refused(inner):
    with pytest.raises(ConfigError, match="not in proportion") as caught:
        base_shapes_from_width(lambda width: Odd(width, inner(width)), 48)
    text = str(caught.value)
    assert "`up.weight`" in text and "constant" in text and str((inner(48), 48)) in text and str((inner(96), 96)) in text


@pytest.mark.parametrize("base", [16, 20, 32, 100])
def test_rounding_to_whole_numbers_is_not_a_constant(base):
    for target in (3 * base, 7 * base + 4, base // 2):
        shapes = base_shapes_from_width(lambda width: Odd(width, int(round(width * 8 / 3))), base, target_width=target)
        assert shapes["up.weight"] == (round(base * 8 / 3), base)


def test_size_stuck_at_a_minimum_at_the_base():
    def build(width: int) -> nn.Module:
        model = Odd(width, width)
        model.slopes = nn.Parameter(torch.zeros(max(1, width // 64)))
        return model

    with pytest.raises(ConfigError, match="does not grow from base to delta") as caught:
        base_shapes_from_width(build, 32, target_width=256)
    text = str(caught.value)
    assert "`slopes`" in text and "base (1,), delta (1,), target (4,)" in text and "minimum" in text


def test_size_that_divides_differently_at_the_target():
    with pytest.raises(ConfigError, match="1 times the base's, while the width is 1.5 times") as caught:
        base_shapes_from_width(lambda width: Odd(width, 64 * (width // 64)), 64, target_width=96)
    assert "target (64, 96)" in str(caught.value)


def test_heads_that_do_not_divide_the_base_width():
    with pytest.raises(ConfigError, match="cannot be built at width 20 .the base.") as caught:
        base_shapes_from_width(lambda width: nn.MultiheadAttention(width, 8), 20)
    assert caught.value.key == "mup.base_width" and "heads" in str(caught.value)


def test_another_architecture_is_named():
    with pytest.raises(ConfigError, match="the target has 6 tensors") as caught:
        base_shapes_from_pair(shapes_of(Toy(16)), shapes_of(Toy(32)), shapes_of(Toy(64, depth=3)))
    assert "blocks.2.norm.weight" in str(caught.value)
    base, delta = {"a": (1, 2)}, {"a": (2,)}
    with pytest.raises(ConfigError, match="ranks differ"):
        base_shapes_from_pair(base, delta)


def test_another_vocabulary_in_the_target_is_refused():
    target = dict(shapes_of(Toy(64)), **{"embedding.weight": (11, 64)})
    with pytest.raises(ConfigError, match="Vocabulary"):
        base_shapes_from_pair(shapes_of(Toy(16)), shapes_of(Toy(32)), target)
