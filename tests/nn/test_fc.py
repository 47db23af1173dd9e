"""FCLayer and FeedForward: the arithmetic, and muP's standard deviations."""

from __future__ import annotations

import math

import pytest
import torch

from ipu_lean.errors import ConfigError
from ipu_lean.nn import Embedding, FCLayer, FeedForward, PopReadout

pytestmark = pytest.mark.pod


def test_hidden_std_follows_the_fan_in_and_says_so():
    torch.manual_seed(0)
    for fan_in in (64, 256, 1024):
        layer = FCLayer(fan_in, 1000, init_scale=1.5)
        measured = layer.linear.weight.std().item()
        assert measured == pytest.approx(1.5 / fan_in**0.5, rel=0.02)
        assert layer.init_stds == {"linear.weight": 1.5 / fan_in**0.5, "linear.bias": 0.0}
        assert not layer.linear.bias.any()


def test_embedding_std_does_not_depend_on_width():
    torch.manual_seed(0)
    for width in (16, 64, 256):
        assert Embedding(2000, width, std=0.1).weight.std().item() == pytest.approx(0.1, rel=0.03)


def test_zero_init_and_reset():
    layer = FCLayer(8, 8, zero_init=True)
    assert not layer.linear.weight.any() and layer.init_stds["linear.weight"] == 0.0
    torch.nn.init.ones_(layer.linear.weight)
    layer.reset_parameters()
    assert not layer.linear.weight.any()
    torch.manual_seed(1)
    first = FCLayer(8, 8)
    torch.manual_seed(1)
    first_again = FCLayer(8, 8)
    assert torch.equal(first.linear.weight, first_again.linear.weight)


def test_order_is_linear_norm_activation():
    layer = FCLayer(5, 6, activation="relu", normalization="layernorm").double()
    x = torch.randn(4, 5, dtype=torch.float64)
    y = x @ layer.linear.weight.t() + layer.linear.bias
    y = (y - y.mean(-1, keepdim=True)) / torch.sqrt(y.var(-1, unbiased=False, keepdim=True) + 1e-5)
    assert torch.allclose(layer(x), y.clamp(min=0), atol=1e-12)
    assert set(layer.init_stds) == {"linear.weight", "linear.bias", "norm.weight", "norm.bias"}


def test_readout_layer_is_a_pop_readout_with_constant_std():
    torch.manual_seed(0)
    layer = FCLayer(256, 3000, is_readout_layer=True, base_width=64, init_scale=2.0)
    assert isinstance(layer.linear, PopReadout) and layer.linear.width_mult == 4.0
    assert layer.linear.weight.std().item() == pytest.approx(2.0 / 8.0, rel=0.02)
    assert layer.init_stds["linear.weight"] == 0.25


@pytest.mark.parametrize("bias", [True, False])
def test_mult_multiplies_the_output(bias):
    plain, scaled = FCLayer(5, 6, bias=bias).double(), FCLayer(5, 6, bias=bias, mult=0.3).double()
    scaled.load_state_dict(plain.state_dict())
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.allclose(scaled(x), 0.3 * plain(x), rtol=1e-13)
    (ours,) = torch.autograd.grad(scaled(x).pow(2).sum(), scaled.linear.weight)
    (truth,) = torch.autograd.grad((0.3 * plain(x)).pow(2).sum(), plain.linear.weight)
    assert truth.norm() > 0 and torch.allclose(ours, truth, rtol=1e-12)
    assert scaled.init_stds == plain.init_stds


def test_dropout_only_in_training():
    layer = FCLayer(64, 64, dropout=0.5)
    x = torch.randn(8, 64)
    assert (layer(x) == 0).float().mean() > 0.3
    layer.eval()
    assert (layer(x) == 0).float().mean() < 0.01 and torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("wrong", [{"activation": "gelo"}, {"normalization": "batch"}])
def test_unknown_names_are_refused(wrong):
    with pytest.raises(ConfigError) as caught:
        FCLayer(4, 4, **wrong)
    assert caught.value.key in wrong


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


CLOSED_FORMS = {
    "gelu": gelu_tanh,
    "relu": lambda x: x.clamp(min=0),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "geglu": gelu_tanh,
    "swiglu": lambda x: x / (1 + torch.exp(-x)),
    "reglu": lambda x: x.clamp(min=0),
}


@pytest.mark.parametrize("kind", sorted(CLOSED_FORMS))
def test_feed_forward_closed_forms(kind):
    torch.manual_seed(0)
    ffn = FeedForward(6, 20, kind).double()
    for parameter in ffn.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 3, 6, dtype=torch.float64)

    def apply(layer, value):
        return value @ layer.linear.weight.t() + layer.linear.bias

    act = CLOSED_FORMS[kind]
    inner = act(apply(ffn.gate, x)) * apply(ffn.up, x) if kind.endswith("glu") else act(apply(ffn.up, x))
    assert torch.allclose(ffn(x), apply(ffn.down, inner), rtol=1e-12, atol=1e-12)
