"""LSH attention as a module: random numbers, rotations and rounds, torch.func, copies, `meta`."""

from __future__ import annotations

import copy

import pytest
import torch

from ipu_lean.nn import LSHSelfAttention
from tests.nn.lsh_common import assert_transformed_alike, make

pytestmark = pytest.mark.pod


def test_random_numbers_of_the_caller_are_left_alone():
    module, x = make(hashes=2), torch.randn(2, 64, 16, dtype=torch.float64)
    before = torch.get_rng_state()
    first = module(x)
    module.redraw(1)
    module.set_hashes(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(module(x), first)


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
def test_dropout_is_reproducible_and_ends_with_training(implementation):
    module = make(attention_dropout=0.5, dropout=0.5, implementation=implementation)
    plain = make(implementation=implementation)
    x = torch.randn(2, 64, 16, dtype=torch.float64)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(module(x))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert torch.equal(module.eval()(x), plain(x))


def test_attention_dropout_keeps_the_mean():
    module = make(attention_dropout=0.5)
    qk, v = torch.randn(1, 64, 2, 8, dtype=torch.float64).expand(400, -1, -1, -1), torch.ones(400, 64, 2, 8).double()
    out = module.attended(qk, v, None)
    assert abs(float(out.mean()) - 1) < 0.01 and float(out.std()) > 0.2


def test_rounds_and_rotations_change_at_run_time():
    module, x = make(hashes=1), torch.randn(2, 64, 16, dtype=torch.float64)
    one = module(x)
    module.set_hashes(4)
    four = module(x)
    assert module.hashes == 4 and module.rotations.shape[2] == 4 and not torch.equal(one, four)
    assert torch.equal(make(hashes=4)(x), four)
    module.set_hashes(1)
    assert torch.equal(module(x), one)
    module.redraw(9)
    assert not torch.equal(module(x), one)
    module.redraw(0)
    assert torch.equal(module(x), one)
    assert not any("rotations" in name for name in module.state_dict())


def test_layers_and_seeds_hash_differently():
    x = torch.randn(2, 64, 16, dtype=torch.float64)
    results = [make(seed=seed, layer=layer)(x) for seed, layer in ((0, 0), (0, 1), (1, 0))]
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
@pytest.mark.parametrize("seq", [64, 8])
def test_torch_func(seq, implementation):
    module = make(hashes=2, implementation=implementation)
    x = torch.randn(3, seq, 16, dtype=torch.float64)
    assert_transformed_alike(module, x)


def test_copies_and_meta():
    module, x = make(hashes=2), torch.randn(2, 64, 16, dtype=torch.float64)
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    with torch.device("meta"):
        empty = LSHSelfAttention(16, 2, seq=64, chunk=8, hashes=2)
        assert empty(torch.zeros(2, 64, 16)).is_meta
    empty = empty.to_empty(device="cpu").double()
    empty.load_state_dict(module.state_dict())
    empty.set_implementation("explicit")
    assert torch.equal(empty(x), module(x))
