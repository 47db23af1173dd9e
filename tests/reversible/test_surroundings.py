"""Random numbers, autocast, buffers and remembered decisions: the second run sees what the first saw and leaves no trace."""
from __future__ import annotations

import pytest
import torch
from torch import nn

from ipu_lean._compat import autocast_state
from ipu_lean.reversible import ReversibleBlock, ReversibleStack, recomputing, remember
from tests.reversible.toys import (
    WIDTH,
    Attention,
    FeedForward,
    assert_same,
    collect,
    data,
    error,
    gradients,
    loss_of,
    reversible,
)

pytestmark = pytest.mark.pod
RECOMPUTING = ["invert", "checkpoint"]


@pytest.mark.parametrize("engine", RECOMPUTING)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_random_state_after_backward_is_that_before(engine, dropout):
    stack = reversible(engine, dropout=dropout)
    before_forward = torch.get_rng_state()
    loss = loss_of(stack(data()))
    torch.rand(5)
    before = torch.get_rng_state()
    loss.backward()
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(before, before_forward)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_the_forward_pass_draws_what_plain_draws(engine):
    states = []
    for kind in ("store", engine):
        stack = reversible(kind, dropout=0.5)
        torch.manual_seed(11)
        stack(data())
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_each_layer_has_its_own_dropout_mask(engine):
    masks = []

    class Dropped(nn.Module):
        def forward(self, x):
            masks.append(nn.functional.dropout(torch.ones(WIDTH), 0.5))
            return x * masks[-1]

    branch = Dropped()
    stack = ReversibleStack([ReversibleBlock([branch, branch])] * 2, engine=engine)
    stack(data().requires_grad_()).sum().backward()
    first, second = masks[:4], masks[4:]
    assert all(not torch.equal(a, b) for i, a in enumerate(first) for b in first[:i])
    expected = first[::-1] if engine == "invert" else first[2:] + first[:2]
    assert len(second) == 4 and all(torch.equal(a, b) for a, b in zip(expected, second))


class Spy(FeedForward):
    """Notes the dtype that matrix products run in, and autocast's state."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        product = self.up(x)
        self.seen.append((product.dtype, *autocast_state("cpu"), autocast_state("cpu")[0] and torch.is_autocast_cache_enabled()))
        return super().forward(x) + product.mean()


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_autocast_is_captured_at_each_call(engine):
    """One stack, called in three ways before a single backward pass outside of autocast."""
    stack = reversible(engine, layers=1, dtype=torch.float32, make=Spy)
    x, spy = data(torch.float32), stack.blocks[0].branches[1]
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        one = stack(x)
        with torch.autocast("cpu", enabled=False):
            two = stack(x * 2)
    three = stack(x * 3)
    first, spy.seen = spy.seen, []
    assert [seen[0] for seen in first] == [torch.bfloat16, torch.float32, torch.float32]
    (one.float().sum() + two.sum() + three.sum()).backward()
    assert sorted(map(str, spy.seen)) == sorted(map(str, first))
    assert not autocast_state("cpu")[0]


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_backward_inside_another_autocast(engine):
    def run(engine):
        stack = reversible(engine, dtype=torch.float32, dropout=0.2)
        torch.manual_seed(7)
        loss = loss_of(stack(data(torch.float32)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss.backward()
        return collect(stack)

    assert_same(run("store"), run(engine), 2e-6)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_autocast_inside_a_branch(engine):
    class Wide(FeedForward):
        """Keeps itself in float32 whatever is around it."""

        def forward(self, x):
            with torch.autocast("cpu", enabled=False):
                return super().forward(x.float())

    class Narrow(FeedForward):
        """Chooses bfloat16 itself."""

        def forward(self, x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    for make, outside in ((Wide, torch.bfloat16), (Narrow, None)):
        options = {"dtype": torch.float32, "make": make, "layers": 2}
        reference = gradients(reversible("store", **options), autocast=outside)
        assert_same(reference, gradients(reversible(engine, **options), autocast=outside), 2e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("engine", RECOMPUTING)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cuda_dropout_and_autocast(engine, dtype):
    class OnDevice(FeedForward):
        pass

    def run(engine):
        torch.manual_seed(0)
        stack = ReversibleStack([ReversibleBlock([OnDevice(0.2), OnDevice(0.2)]) for _ in range(3)], engine=engine).cuda()
        torch.manual_seed(7)
        with torch.autocast("cuda", dtype=dtype):
            y = stack(data(torch.float32).cuda())
        loss = (y.float() ** 2).mean()
        before = torch.cuda.get_rng_state()
        loss.backward()
        assert torch.equal(before, torch.cuda.get_rng_state())
        return collect(stack)

    assert_same(run("store"), run(engine), 2e-3)


class Normalised(nn.Module):
    """BatchNorm over the features, with its running statistics and its counter."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(self.norm(x.flatten(0, 1)).view(x.shape))


class Drifting(nn.Module):
    """Its output depends on a counter that each run in training mode moves: the second run must start from the old value."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.ones(1))
        self.register_buffer("replaced", torch.ones(1))
        self.register_buffer("table", torch.linspace(0.5, 1, WIDTH), persistent=False)

    def forward(self, x):
        h = torch.tanh(self.linear(x)) * self.count.clone() * self.replaced * self.table
        if self.training:
            self.count.add_(0.25)
            self.replaced = self.replaced * 1.1
        return h


@pytest.mark.parametrize("engine", RECOMPUTING)
@pytest.mark.parametrize("make", [Normalised, Drifting])
@pytest.mark.parametrize("visits", [[0, 1, 2], [0, 0, 1]])
def test_buffers_are_updated_once(engine, make, visits):
    def run(engine):
        stack = reversible(engine, layers=3, make=make, visits=visits)
        found = {}
        for step in range(3):
            stack.zero_grad()
            found.update({f"{step} {name}": g for name, g in gradients(stack).items()})
        stack.eval()
        found.update({f"eval {name}": g for name, g in gradients(stack).items()})
        return found, {name: b.clone() for name, b in stack.named_buffers()}

    (reference, buffers), (found, recomputed) = run("store"), run(engine)
    assert_same(reference, found, 1e-10)
    assert buffers and set(buffers) == set(recomputed)
    for name in buffers:
        assert error(buffers[name].double(), recomputed[name].double()) < 1e-12, name
    if make is Normalised:
        assert recomputed["blocks.0.branches.1.norm.num_batches_tracked"] == 3 * visits.count(0)


def test_buffers_that_do_not_change_are_not_copied_again():
    from ipu_lean.reversible.surroundings import Buffers

    branch = Drifting()
    for copies in (3, 2):
        buffers = Buffers([branch])
        assert sum(copy is not None for *_, copy in buffers._entries) == copies
        branch(torch.ones(1, WIDTH))
        assert {name for _, name, _ in buffers.changed()} == {"count", "replaced"}


class Router(nn.Module):
    """Sends each token one of two ways, by the sign of a number so near zero that rounding decides."""

    def __init__(self, kept):
        super().__init__()
        self.ways = nn.ModuleList([FeedForward(), FeedForward()])
        self.kept, self.decisions = kept, []

    def forward(self, x):
        def decide():
            return torch.sin(x.sum(-1, keepdim=True) * 1e8) > 0

        choice = remember(decide) if self.kept else decide()
        self.decisions.append((recomputing(), choice))
        return torch.where(choice, self.ways[0](x), self.ways[1](x))


def decisions_differ(kept):
    """Whether a decision of the first run differs from that of the second; one step with `visits` and two calls."""
    stack = reversible("invert", layers=2, make=lambda: Router(kept), visits=[0, 1, 0], dtype=torch.float32)
    (loss_of(stack(data(torch.float32, 1))) + loss_of(stack(data(torch.float32, 2)))).backward()
    differ = 0
    for block in stack.blocks:
        first = [choice for again, choice in block.branches[1].decisions if not again]
        second = [choice for again, choice in block.branches[1].decisions if again]
        assert len(first) == len(second) > 0
        # Frames of one call are replayed in reverse; the second call's graph comes first, since its nodes are younger.
        differ += sum(not torch.equal(a, b) for a, b in zip(first, reversed(second)))
    return differ


def test_remembered_decisions_survive_rounding():
    assert decisions_differ(kept=False) > 0, "the test needs decisions that rounding can turn"
    assert decisions_differ(kept=True) == 0


@pytest.mark.parametrize("engine", ["invert", "checkpoint"])
def test_remembered_decisions_inside_a_nested_stack(engine):
    class Nested(nn.Module):
        def __init__(self, engine):
            super().__init__()
            self.inner = ReversibleStack([ReversibleBlock([Attention(), Router(True)])], engine=engine)

        def forward(self, x):
            return self.inner(x)

    options = {"layers": 2, "dtype": torch.float32}
    stack = reversible(engine, make=lambda: Nested(engine), **options)
    reference = reversible("store", make=lambda: Nested("store"), **options)
    assert_same(gradients(reference), gradients(stack), 1e-5)


def test_outside_a_recorded_run():
    assert remember(lambda: 5) == 5 and not recomputing()
    with torch.no_grad():
        assert reversible("invert", make=lambda: Router(True))(data()) is not None


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_functional_call(engine):
    """The second run comes when the parameters of `functional_call` have left the module again."""
    from torch.func import functional_call

    def run(engine):
        stack = reversible(engine, dropout=0.2, make=Drifting).eval()
        generator = torch.Generator().manual_seed(8)
        weights = {
            name: (p.detach() + 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)).requires_grad_()
            for name, p in stack.named_parameters()
        }
        torch.manual_seed(7)
        members = {name: w * 1.5 for name, w in weights.items()}
        members.update({name: b + 0.5 for name, b in stack.named_buffers()})
        loss = loss_of(functional_call(stack, members, (data(),)))
        loss.backward()
        assert all(p.grad is None for p in stack.parameters())
        return {name: w.grad for name, w in weights.items()}

    reference = run("store")
    assert_same(reference, run(engine), 1e-10)
    own = gradients(reversible("store", dropout=0.2, make=Drifting).eval())
    assert error(reference["blocks.0.branches.1.linear.weight"], own["blocks.0.branches.1.linear.weight"]) > 1e-2


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_parameters_replaced_before_the_backward_pass(engine):
    stack = reversible(engine)
    old = dict(stack.named_parameters())
    loss = loss_of(stack(data()))
    for block in stack.blocks:
        block.branches[1].down.weight = nn.Parameter(torch.zeros_like(block.branches[1].down.weight))
    loss.backward()
    found = {name: p.grad for name, p in old.items()}
    assert_same(gradients(reversible("store"), data()), found, 1e-10)
    assert all(block.branches[1].down.weight.norm() == 0 for block in stack.blocks)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_torch_func_runs_as_store(engine):
    from torch.func import functional_call, grad, vmap

    stack = reversible(engine).eval()
    weights = {name: p.detach() for name, p in stack.named_parameters()}
    found = grad(lambda w: loss_of(functional_call(stack, w, (data(),))))(weights)
    assert_same(gradients(reversible("store").eval(), data()), found, 1e-10)
    batch = torch.stack([data(seed=seed) for seed in range(3)])
    assert torch.allclose(vmap(stack)(batch), torch.stack([stack(x) for x in batch]), atol=1e-12)
