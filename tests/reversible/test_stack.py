from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ipu_lean.errors import ConfigError
from ipu_lean.reversible import ReversibleBlock, ReversibleStack
from tests.reversible.toys import WIDTH, Attention, FeedForward, data, error, reversible

pytestmark = pytest.mark.pod
ENGINES = ["invert", "store", "checkpoint"]


class Constant(nn.Module):
    """f(x) = value, whatever x."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))

    def forward(self, x):
        return self.value.expand_as(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_forward_by_hand(engine):
    """Two streams written out: attention reads b and writes a, then the FFN reads that and writes b."""
    stack = reversible(engine, layers=2)
    x0 = data()
    (attn1, ffn1), (attn2, ffn2) = (block.branches for block in stack.blocks)
    a = x0 + attn1(x0)
    b = x0 + ffn1(a)
    a = a + attn2(b)
    b = b + ffn2(a)
    assert torch.equal(stack(x0), a + b - x0)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("order", "x", "y"),
    [([1.0, 10.0, 100.0, 1000.0], 101.0, 1010.0)],
)
def test_which_branch_writes_which_stream(engine, order, x, y):
    """aaff: branches 1 and 3 write the first stream, 2 and 4 the second: each stream gets one attention and one FFN."""
    block = ReversibleBlock([Constant(v) for v in order])
    zero = torch.zeros(1, 1, 1)
    for kind, expected in {"x": x, "y": y, "sum": x + y, "sum-minus-input": x + y, "mean": (x + y) / 2}.items():
        assert ReversibleStack([block], output=kind, engine=engine)(zero).item() == expected
    one = torch.ones(1, 1, 1)
    assert ReversibleStack([block], output="sum", engine=engine)(one).item() == 2 + x + y
    assert ReversibleStack([block], output="sum-minus-input", engine=engine)(one).item() == 1 + x + y


@pytest.mark.parametrize("order", ["attn-ffn", "aaff"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 2e-6)])
def test_public_inverse(order, dtype, tolerance):
    stack = reversible("invert", layers=24, order=order, dtype=dtype).eval()
    a0, b0 = data(dtype), data(dtype, seed=5)
    with torch.no_grad():
        a, b = stack.inverse(*stack.run(a0, b0))
        moved = stack.run(a0, b0)[1]
    assert error(a0, a) < tolerance and error(b0, b) < tolerance
    assert error(b0, moved) > 0.1, "the stack did something that had to be undone"


def test_inverse_with_a_mask():
    stack, mask = reversible("invert").eval(), torch.randn(6, 6, dtype=torch.float64)
    with torch.no_grad():
        a, b = stack.inverse(*stack.run(data(), data(seed=2), mask=mask), mask=mask)
        wrong, _ = stack.inverse(*stack.run(data(), data(seed=2), mask=mask))
    assert error(data(), a) < 1e-13 and error(data(seed=2), b) < 1e-13
    assert error(data(), wrong) > 1e-3


@pytest.mark.parametrize("engine", ENGINES)
def test_keyword_arguments_reach_those_who_name_them(engine):
    seen = []

    class Taker(nn.Module):
        def forward(self, x, mask=None):
            seen.append(mask)
            return x * 0.5

    class Other(nn.Module):
        def forward(self, x):
            return x * 0.25

    mask = torch.ones(1)
    stack = ReversibleStack([ReversibleBlock([Taker(), Other()])], engine=engine)
    stack(data(), mask=mask)
    assert len(seen) == 1 and seen[0] is mask
    stack(data(), mask=None)
    assert seen[1] is None
    with pytest.raises(TypeError, match="gain"):
        stack(data(), gain=mask)


def test_keyword_arguments_through_wrappers():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *args, **kwargs):
            return self.module(*args, **kwargs)

    plain = ReversibleStack([ReversibleBlock([Attention(), FeedForward()])]).double()
    wrapped = ReversibleStack([ReversibleBlock([Wrapper(b) for b in plain.blocks[0].branches])])
    mask = torch.randn(6, 6, dtype=torch.float64)
    assert torch.equal(plain(data(), mask=mask), wrapped(data(), mask=mask))
    assert not torch.equal(plain(data(), mask=mask), plain(data()))


@pytest.mark.parametrize("engine", ENGINES)
def test_blocks_are_called_as_modules(engine):
    stack, called = reversible(engine), []
    for block in stack.blocks:
        block.register_forward_hook(lambda module, args, out: called.append(module))
    y = stack(data())
    assert called == list(stack.blocks)
    y.sum().backward()


def test_shared_blocks_are_registered_once_and_run_in_order():
    stack = reversible("invert", layers=2, visits=[0, 0, 1, 1, 0])
    assert len(stack.blocks) == 2
    assert len(stack.state_dict()) == len(list(stack.parameters())) == 2 * len(list(stack.blocks[0].parameters()))
    stack(data())
    assert [block.branches[0].calls for block in stack.blocks] == [3, 2]
    twin = copy.deepcopy(stack)
    assert twin.executed()[0] is twin.executed()[4] is twin.blocks[0] and twin.blocks[0] is not stack.blocks[0]
    assert torch.equal(twin(data()), stack(data()))


def test_replaced_blocks_are_the_ones_that_run():
    stack = reversible("invert", layers=2)
    stack.blocks[1] = ReversibleBlock([Attention(), FeedForward()]).double()
    stack(data())
    assert stack.blocks[1].branches[0].calls == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_the_callers_tensor_is_left_alone(engine):
    stack, x = reversible(engine), data()
    y = stack(x)
    y.sum().backward()
    assert torch.equal(x, data()) and x._version == 0


@pytest.mark.parametrize(
    "wrong",
    [
        lambda blocks: ReversibleStack([]),
        lambda blocks: ReversibleStack(blocks, engine="inverted"),
        lambda blocks: ReversibleStack(blocks, output="both"),
        lambda blocks: ReversibleStack(blocks, input="zero"),
        lambda blocks: ReversibleStack(blocks, input="zeros", output="sum-minus-input"),
        lambda blocks: ReversibleStack(blocks, output="gate-channels"),
        lambda blocks: ReversibleStack([*blocks, ReversibleBlock([Attention(), FeedForward()], coupling="mean")]),
        lambda blocks: ReversibleStack(blocks, checkpoint_every=0),
        lambda blocks: ReversibleBlock([Attention()]),
        lambda blocks: ReversibleBlock([]),
        lambda blocks: ReversibleBlock([Attention(), FeedForward()], coupling="impulse"),
    ],
)
def test_mistakes_are_config_errors(wrong):
    with pytest.raises(ConfigError):
        wrong([ReversibleBlock([Attention(), FeedForward()])])


def test_repr_says_what_it_is():
    assert "layers=3" in repr(reversible("invert")) and "engine=invert" in repr(reversible("invert"))
    assert f"{WIDTH}" in repr(reversible("store"))
