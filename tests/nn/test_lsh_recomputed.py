"""Local and LSH attention in recomputed stacks: buckets found again, dropout replayed, state of a call and not of a module."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ipu_lean.nn import FeedForward, LayerNorm, LocalSelfAttention, LSHSelfAttention
from ipu_lean.reversible import ResidualBlock, ResidualStack, ReversibleBlock, ReversibleStack, remember

pytestmark = pytest.mark.pod

WIDTH, SEQ = 16, 32


class Branch(nn.Module):
    def __init__(self, inner, takes_present=True):
        super().__init__()
        self.norm, self.inner, self.takes_present = LayerNorm(WIDTH), inner, takes_present

    def forward(self, x, present=None):
        return self.inner(self.norm(x), present=present) if self.takes_present else self.inner(self.norm(x))


def stack_of(engine, reversible=True, layers=4, hashes=4, dropout=0.5, implementation="explicit", keep=True):
    torch.manual_seed(2)
    blocks = []
    for layer in range(layers):
        shape = {"chunk": 4, "dropout": dropout, "attention_dropout": dropout, "implementation": implementation}
        if layer % 2:
            shape.update(seq=SEQ, layer=layer, hashes=hashes, remember=remember if keep else None)
            attention = LSHSelfAttention(WIDTH, 2, **shape)
        else:
            attention = LocalSelfAttention(WIDTH, 2, **shape)
        branches = [Branch(attention), Branch(FeedForward(WIDTH, 32, "relu", dropout=dropout), takes_present=False)]
        blocks.append(ReversibleBlock(branches) if reversible else ResidualBlock(branches))
    kind = ReversibleStack if reversible else ResidualStack
    return kind(blocks, engine=engine).double()


def lsh_layers(stack):
    return [module for module in stack.modules() if isinstance(module, LSHSelfAttention)]


def run(stack, x, present=None, seed=7):
    """Output, and the gradients of the input and of every parameter."""
    torch.manual_seed(seed)
    x = x.detach().requires_grad_()
    y = stack(x, present=present)
    after = torch.get_rng_state()
    found = torch.autograd.grad((y * torch.linspace(-1, 2, WIDTH, dtype=y.dtype)).sum(), [x, *stack.parameters()])
    assert torch.equal(torch.get_rng_state(), after)
    return [y.detach(), *found]


def check_agreement(ours, theirs, tolerance):
    for one, other in zip(ours, theirs):
        assert other.abs().max() > 0
        assert (one - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
@pytest.mark.parametrize("reversible,engine", [(True, "invert"), (True, "checkpoint"), (False, "checkpoint")])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_recomputed_equals_stored(implementation, reversible, engine, dtype, tolerance):
    """With dropout 0.5, four rounds and absent tokens."""
    recomputed, stored = (stack_of(e, reversible, implementation=implementation).to(dtype) for e in (engine, "store"))
    x, present = torch.randn(2, SEQ, WIDTH, dtype=dtype), torch.ones(2, SEQ, dtype=torch.bool)
    present[0, 20:] = False
    assert any(module.training and module.attention_dropout for module in lsh_layers(recomputed))
    check_agreement(run(recomputed, x, present), run(stored, x, present), tolerance)


def test_buckets_are_chosen_once(monkeypatch):
    """Coarse inputs in bf16 are full of ties, which the rebuilt inputs would break in another way."""
    chosen, used = [], []
    choose, use = LSHSelfAttention._order, LSHSelfAttention.order_of

    def recorded_choice(self, *inputs):
        chosen.append(choose(self, *inputs))
        return chosen[-1]

    def recorded_use(self, *inputs):
        used.append((self, *use(self, *inputs)))
        return used[-1][1:]

    monkeypatch.setattr(LSHSelfAttention, "_order", recorded_choice)
    monkeypatch.setattr(LSHSelfAttention, "order_of", recorded_use)
    stack = stack_of("invert", dropout=0.0).bfloat16()
    x = torch.randint(-1, 2, (2, SEQ, WIDTH)).bfloat16().requires_grad_()
    y = stack(x)
    forward = list(used)
    assert len(chosen) == len(forward) == 2
    y.float().sum().backward()
    assert len(chosen) == 2 and len(used) == 4, "hashed again in the backward pass"
    for module, order, undo in used[2:]:
        first = [entry for entry in forward if entry[0] is module][0]
        assert torch.equal(first[1], order) and torch.equal(first[2], undo)


def test_hashing_again_would_be_noticed():
    """The test above is about something: with rounding, a second hash of the rebuilt input is another one."""
    stack = stack_of("invert", dropout=0.0, layers=6).bfloat16()
    module, seen = lsh_layers(stack)[0], []

    def watch(compute):
        found = remember(compute)
        with torch.no_grad():
            seen.append((found, compute()))
        return found

    module.remember = watch
    y = stack((3 * torch.randn(4, SEQ, WIDTH)).bfloat16().requires_grad_())
    y.float().sum().backward()
    (first, _), (kept, anew) = seen
    assert torch.equal(first, kept) and not torch.equal(kept, anew)


@pytest.mark.parametrize("implementation", ["explicit", "fused"])
def test_two_forward_passes_before_a_backward_pass(implementation):
    stack = stack_of("invert", implementation=implementation)
    one, other = (torch.randn(2, SEQ, WIDTH, dtype=torch.float64) for _ in range(2))
    alone = run(stack, one)
    torch.manual_seed(7)
    x = one.clone().requires_grad_()
    y = stack(x)
    stack(other[:, :16].clone().requires_grad_())  # other lengths and buckets, never used
    for module in lsh_layers(stack):
        module.redraw(1)
        module.set_hashes(2)
    weights = torch.linspace(-1, 2, WIDTH, dtype=y.dtype)
    check_agreement(torch.autograd.grad((y * weights).sum(), [x, *stack.parameters()]), alone[1:], 1e-12)


def test_backward_in_evaluation_mode():
    recomputed, stored = (stack_of(engine).eval() for engine in ("invert", "store"))
    x = torch.randn(2, SEQ, WIDTH, dtype=torch.float64)
    check_agreement(run(recomputed, x), run(stored, x), 1e-12)
    assert torch.equal(run(recomputed, x, seed=1)[0], run(recomputed, x, seed=2)[0])


def test_frozen_inputs_train_the_layers():
    recomputed, stored = (stack_of(engine) for engine in ("invert", "store"))
    x = torch.randn(2, SEQ, WIDTH, dtype=torch.float64)
    found = []
    for stack in (recomputed, stored):
        torch.manual_seed(3)
        stack(x).square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in stack.parameters())
        found.append([p.grad for p in stack.parameters()])
    check_agreement(*found, 1e-11)


def test_what_is_remembered_is_small():
    """Two bytes a token, head and round: nothing else of a layer stays until the backward pass."""
    sizes = []

    def watch(compute):
        def measured():
            sizes.append(compute())
            return sizes[-1]

        return remember(measured)

    stack = stack_of("invert", layers=2)
    lsh_layers(stack)[0].remember = watch
    stack(torch.randn(2, SEQ, WIDTH, dtype=torch.float64).requires_grad_())
    (kept,) = sizes
    assert kept.element_size() == 2 and kept.numel() == 2 * 2 * 4 * SEQ


def test_without_a_stack_the_module_keeps_nothing():
    module = LSHSelfAttention(WIDTH, 2, seq=SEQ, chunk=4, remember=remember)
    before = set(vars(module)) | set(module._buffers)
    x = torch.randn(2, SEQ, WIDTH, requires_grad=True)
    module(x).sum().backward()
    assert set(vars(module)) | set(module._buffers) == before and x.grad.abs().max() > 0
