"""Readouts: the mup package's numbers bit for bit, and a multiplier that nothing loses."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from ipu_lean.errors import ConfigError
from ipu_lean.nn import Embedding, PopReadout, TiedReadout


@pytest.mark.parametrize("width,base", [(64, 64), (96, 64), (64, 256), (100, 7), (512, 48), (30, 31)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("output_mult", [1.0, 0.3, 7.0])
def test_equals_mup_bit_for_bit(width, base, bias, output_mult):
    mup = pytest.importorskip("mup", reason="the reference is the mup package")
    torch.manual_seed(0)
    ours = PopReadout(width, 11, bias=bias, base_width=base, output_mult=output_mult)
    theirs = mup.MuReadout(width, 11, bias=bias, output_mult=output_mult)
    reference = torch.nn.Sequential(theirs)
    mup.set_base_shapes(
        reference,
        torch.nn.Sequential(mup.MuReadout(base, 11, bias=bias)),
        delta=torch.nn.Sequential(mup.MuReadout(base + 1, 11, bias=bias)),
    )
    if bias:
        torch.nn.init.normal_(ours.bias)
    theirs.load_state_dict({name: tensor for name, tensor in ours.state_dict().items() if name != "_extra_state"})
    assert theirs.width_mult() == ours.width_mult
    x = torch.randn(3, 5, width)
    ours_in, theirs_in = x.clone().requires_grad_(), x.clone().requires_grad_()
    a, b = ours(ours_in), theirs(theirs_in)
    assert torch.equal(a, b)
    seed = torch.randn_like(a)
    a.backward(seed)
    b.backward(seed)
    assert torch.equal(ours_in.grad, theirs_in.grad)
    for name, parameter in ours.named_parameters():
        assert parameter.grad.abs().sum() > 0
        assert torch.equal(parameter.grad, getattr(theirs, name).grad), name


pod = pytest.mark.pod


@pod
def test_width_mult_is_one_without_a_base():
    assert PopReadout(64, 3).width_mult == 1.0
    assert PopReadout(64, 3, base_width=16).width_mult == 4.0
    assert PopReadout(16, 3, base_width=64).width_mult == 0.25


@pod
def test_initial_std_is_the_same_at_every_width():
    torch.manual_seed(0)
    for width in (64, 256, 1024):
        readout = PopReadout(width, 4000, base_width=64)
        assert readout.weight.std().item() == pytest.approx(64**-0.5, rel=0.02)
        assert readout.init_stds["weight"] == 64**-0.5
    zero = PopReadout(64, 7, readout_zero_init=True)
    assert zero.init_stds["weight"] == 0 and not zero.weight.any() and not zero.bias.any()


@pod
def test_zero_start_consumes_the_same_random_numbers():
    torch.manual_seed(0)
    PopReadout(8, 4)
    after = torch.rand(1)
    torch.manual_seed(0)
    PopReadout(8, 4, readout_zero_init=True)
    assert torch.equal(after, torch.rand(1))


@pod
def test_copies_and_pickles_keep_the_multiplier():
    readout = PopReadout(48, 5, base_width=16, output_mult=2.0)
    x = torch.randn(2, 48)
    for other in (copy.deepcopy(readout), pickle.loads(pickle.dumps(readout))):
        assert torch.equal(other(x), readout(x))


@pod
def test_state_holds_the_base_width_as_a_tensor():
    saved = PopReadout(48, 5, base_width=16).state_dict()
    assert all(isinstance(value, torch.Tensor) for value in saved.values())
    fresh = PopReadout(48, 5)
    fresh.load_state_dict(saved)
    assert fresh.base_width == 16 and fresh.width_mult == 3.0
    with pytest.raises(ConfigError) as caught:
        PopReadout(48, 5, base_width=24).load_state_dict(saved)
    assert "16" in str(caught.value) and "24" in str(caught.value)


@pod
def test_tied_readout_is_the_embedding_transposed_and_holds_nothing():
    embedding = Embedding(7, 12, std=0.5)
    readout = TiedReadout(embedding, base_width=4, output_mult=1.5)
    x = torch.randn(2, 3, 12)
    expected = (1.5 * x / 3.0) @ embedding.weight.t()
    assert torch.allclose(readout(x), expected, atol=1e-6)
    assert not list(readout.parameters()) and list(readout.state_dict()) == ["_extra_state"]
