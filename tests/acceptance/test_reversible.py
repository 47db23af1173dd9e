"""Gradients of every allowed coupling, order, input and output from 2 to 24 layers, of which the suite runs a sample."""
from __future__ import annotations

import pytest

from tests.reversible.test_every_coupling import KINDS, allowed, build, one_step
from tests.reversible.toys import assert_same

ALLOWED = [(kind, input, output) for kind, input, output in KINDS if allowed(kind[0], input, output)]


@pytest.mark.parametrize("order", ["attn-ffn", "aaff"])
@pytest.mark.parametrize(("kind", "input", "output"), ALLOWED)
def test_two_to_twenty_four_layers(kind, input, output, order):
    for layers in (2, 6, 12, 24):
        reference, _ = one_step(build("store", *kind, input, output, layers, order), input)
        found, _ = one_step(build("invert", *kind, input, output, layers, order), input)
        named = {name: gradient for name, gradient in reference.items() if gradient.norm() > 1e-12}
        assert len(named) >= len(reference) - 4 and set(found) == set(reference)
        assert_same(named, {name: found[name] for name in named}, 1e-9)
