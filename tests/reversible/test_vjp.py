"""Derived backward passes against plain autograd in float64."""
from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ipu_lean.models.block import AttentionBranch, FeedForwardBranch
from ipu_lean.models.spec import GPTSpec
from ipu_lean.nn import LearnedPositions, Rotary, make_norm
from ipu_lean.reversible.module_vjp import ModuleVJP, draw
from ipu_lean.reversible.vjp import Underivable, derive, op_name

pytestmark = pytest.mark.pod

WIDTH, SEQ = 12, 6
KINDS: Dict[str, Dict[str, Any]] = {
    "gelu, layernorm": {},
    "swiglu, rmsnorm, sandwich": {"activation": "swiglu", "norm": "rmsnorm", "sandwich": True, "branch_mult": 0.5},
    "geglu, no positions": {"activation": "geglu", "positions": "none"},
    "reglu, no bias": {"activation": "reglu", "bias": False, "branch_mult": 0.5},
    "relu, sandwich": {"activation": "relu", "sandwich": True},
    "silu": {"activation": "silu", "attention_scale": 0.3},
}


def spec(**changes: Any) -> GPTSpec:
    return GPTSpec(**{"width": WIDTH, "depth": 2, "heads": 3, "ffn_width": 20, "vocab": 11, "seq": SEQ, "attention": "explicit",
                      **changes})


def lively(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter drawn at random, in float64."""
    module = module.double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64) + (parameter.dim() == 1)
    return module


def branches(**changes: Any) -> List[nn.Module]:
    made = spec(**changes)
    rotary = Rotary(SEQ, WIDTH // 3) if made.positions == "rotary" else None
    return [lively(AttentionBranch(made, rotary)), lively(FeedForwardBranch(made))]


def draw_like(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gap(module: nn.Module, x: Tensor, zero: Sequence[str] = (), kwargs: Optional[Dict[str, Tensor]] = None) -> float:
    """Largest relative difference between the derived graph's gradients and autograd's; equal values are asserted, and that no
    reference gradient is zero but the named ones'."""
    kwargs = kwargs or {}
    vjp = ModuleVJP(module)
    x = x.detach().requires_grad_()
    torch.manual_seed(3)
    expected = module(x, **kwargs)
    dy = draw_like(*expected.shape)
    reference = torch.autograd.grad(expected, [x, *module.parameters()], dy)
    torch.manual_seed(3)
    masks = draw(vjp.masks((x,), kwargs), x)
    evaluation = vjp.begin((x.detach(),), kwargs, masks)
    torch.testing.assert_close(evaluation.values[0], expected.detach(), rtol=1e-12, atol=1e-12)
    found = evaluation.pull(dy)
    assert len(found) == len(reference)
    worst = 0.0
    for name, one, other in zip(["input", *vjp.names], reference, found):
        if name in zero:
            assert float(one.norm()) < 1e-12 and (other is None or float(other.norm()) < 1e-12)
            continue
        assert float(one.norm()) > 1e-6, name
        assert other is not None, name
        worst = max(worst, float((one - other).norm() / one.norm()))
    return worst


@pytest.mark.parametrize("kind", KINDS)
def test_branches(kind: str) -> None:
    """Without positions the key's bias moves all scores of a row alike, so its true gradient is zero."""
    zero = ["attention.key.linear.bias"] if "no positions" in kind else []
    for branch in branches(**KINDS[kind]):
        assert gap(branch, draw_like(2, SEQ, WIDTH), zero) < 1e-10


@pytest.mark.parametrize("boolean", [True, False])
def test_attention_with_a_mask(boolean: bool) -> None:
    attention = branches()[0]
    seen = torch.ones(2, 1, 1, SEQ, dtype=torch.bool)
    seen[0, ..., :2] = False
    mask = seen if boolean else draw_like(2, 3, SEQ, SEQ)
    assert gap(attention, draw_like(2, SEQ, WIDTH), kwargs={"mask": mask}) < 1e-10


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms(kind: str) -> None:
    assert gap(lively(make_norm(kind, WIDTH)), draw_like(2, SEQ, WIDTH)) < 1e-10


class Positioned(nn.Module):
    """Learned positions for fewer tokens than there are: a slice of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = LearnedPositions(SEQ + 2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.positions(x, 1)) * x


def test_learned_positions() -> None:
    assert gap(lively(Positioned()), draw_like(2, SEQ, WIDTH)) < 1e-10


def test_dropout_is_the_given_masks_in_both_parts() -> None:
    for branch in branches(dropout=0.3, attention_dropout=0.2):
        assert gap(branch, draw_like(2, SEQ, WIDTH)) < 1e-10
    attention = branches(dropout=0.3, attention_dropout=0.2)[0]
    vjp, x = ModuleVJP(attention), draw_like(2, SEQ, WIDTH)
    assert [(mask.shape, mask.rate) for mask in vjp.masks((x,))] == [((2, 3, SEQ, SEQ), 0.2), ((2, SEQ, WIDTH), 0.3)]
    masks = draw(vjp.masks((x,)), x)
    assert torch.equal(vjp.begin((x,), masks=masks).values[0], vjp.begin((x,), masks=masks, pull=False).values[0])
    attention.eval()
    assert vjp.masks((x,)) == []
    torch.testing.assert_close(vjp.begin((x,)).values[0], attention(x).detach())


def test_masks_drop_their_share() -> None:
    (mask,) = draw(ModuleVJP(nn.Dropout(0.25)).masks((torch.ones(100, 100),)), torch.randn(3))
    assert mask.dtype == torch.bool
    assert abs(mask.double().mean().item() - 0.75) < 0.02  # five standard deviations


def test_equal_branches_are_derived_once() -> None:
    cache: Dict[Any, Any] = {}
    x = draw_like(2, SEQ, WIDTH)
    first, second = branches()[0], branches()[0]
    assert ModuleVJP(first, cache=cache).pullback((x,)) is ModuleVJP(second, cache=cache).pullback((x,))
    other = branches(norm_eps=1e-3)[0]
    assert ModuleVJP(other, cache=cache).pullback((x,)) is not ModuleVJP(first, cache=cache).pullback((x,))
    second.attention.scale = 7.0  # a plain attribute is part of what is computed
    assert ModuleVJP(second, cache=cache).pullback((x,)) is not ModuleVJP(first, cache=cache).pullback((x,))
    assert len(cache) == 3
    for seed, module in enumerate((first, other, second)):
        assert gap(lively(module, seed), x) < 1e-10


def test_each_shape_and_type_has_its_own_graph() -> None:
    vjp = ModuleVJP(branches()[1])
    long, short = draw_like(2, SEQ, WIDTH), draw_like(1, 3, WIDTH)
    assert vjp.pullback((long,)) is vjp.pullback((long.clone(),))
    assert vjp.pullback((long,)) is not vjp.pullback((short,))
    assert gap(vjp.module, short) < 1e-10
    half = ModuleVJP(branches()[0].half()).pullback((long.half(),))
    assert half.outputs[0].dtype == torch.float16 and "aten::_softmax" in half.ops()


def test_modules_are_left_as_they_were() -> None:
    """A part used twice is put back, and weights are read when they are needed."""
    rotary = Rotary(SEQ, WIDTH // 3)
    both = nn.Sequential(*[lively(AttentionBranch(spec(), rotary)) for _ in range(2)])
    before = [id(tensor) for tensor in (*both.parameters(), *both.buffers())]
    assert gap(both, draw_like(2, SEQ, WIDTH)) < 1e-10
    assert [id(tensor) for tensor in (*both.parameters(), *both.buffers())] == before
    assert not rotary.cos.is_meta


class Twice(nn.Module):
    """One weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH, False), nn.Linear(WIDTH, WIDTH, False)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x)))


def test_tied_weights_gather_both_gradients() -> None:
    assert gap(lively(Twice()), draw_like(2, WIDTH)) < 1e-10


def test_a_cotangent_may_depend_on_the_value() -> None:
    x = draw_like(4)
    derived = derive(lambda own, _: ((own[0].sin() * own[1],), (own[0] + 1,)), (x, x), ())
    evaluation = derived.begin((x, 2 * x))
    assert torch.equal(evaluation.extras[0], x + 1)
    gradients = evaluation.pull(evaluation.values[0] * 3)
    y = x.sin() * 2 * x
    torch.testing.assert_close(gradients[0], 3 * y * x.cos() * 2 * x)
    torch.testing.assert_close(gradients[1], 3 * y * x.sin())


def test_gradients_without_the_value_and_zero_ones() -> None:
    x = draw_like(4)
    derived = derive(lambda own, _: ((own[0] ** 2, own[0] + 1), ()), (x, x), ())
    first, second = derived.gradients_at((x, x), (x, x))
    torch.testing.assert_close(first, 2 * x * x + x)
    assert second is None


def test_writes_in_place_become_plain() -> None:
    """gather's derivative adds into a tensor of zeros."""
    index = torch.tensor([[0], [2], [2]])
    x = draw_like(3, 4)
    derived = derive(lambda own, more: ((own[0].gather(1, more[0]),), ()), (x,), (index,))
    assert not [name for name in derived.ops() if name.endswith("_")]
    (found,) = derived.begin((x,), (index,)).pull(draw_like(3, 1))
    torch.testing.assert_close(found, torch.zeros_like(x).scatter_add_(1, index, draw_like(3, 1)))


@pytest.mark.parametrize("cut", [slice(1, 4), slice(0, 5), slice(-2, 7)])
def test_slices_give_padded_gradients(cut: slice) -> None:
    x = draw_like(2, 7, 3)
    derived = derive(lambda own, _: ((own[0][:, cut] * own[0][:, 2:3],), ()), (x,), ())
    assert "aten::constant_pad_nd" in derived.ops()
    leaf = x.clone().requires_grad_()
    value = leaf[:, cut] * leaf[:, 2:3]
    (expected,) = torch.autograd.grad(value.sum(), leaf)
    torch.testing.assert_close(derived.begin((x,)).pull(torch.ones_like(value))[0], expected)


def test_what_the_device_lacks_is_decomposed_or_refused() -> None:
    x = draw_like(3, 4)

    def allowed(node: fx.Node) -> bool:
        return op_name(node) not in ("aten::gelu_backward", "aten::tanh_backward")

    derived = derive(lambda own, _: ((F.gelu(own[0], approximate="tanh"),), ()), (x,), (), allowed)
    assert "aten::gelu_backward" not in derived.ops()
    with pytest.raises(Underivable, match="aten::mul") as caught:
        derive(lambda own, _: ((own[0] * own[0],), ()), (x,), (), lambda node: op_name(node) != "aten::mul")
    assert caught.value.ops == ["aten::mul"]


class Noisy(nn.Module):
    """Draws random numbers that no mask stands for."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rand_like(x)


def test_other_random_numbers_are_refused() -> None:
    with pytest.raises(Underivable, match="random numbers .* aten::rand_like"):
        ModuleVJP(Noisy()).pullback((draw_like(3),))
