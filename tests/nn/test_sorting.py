"""Hashing and the order of buckets: counting gives what a stable sort gives, bit for bit; bucket counts; rotations."""

from __future__ import annotations

import copy

import pytest
import torch

from ipu_lean.errors import ConfigError
from ipu_lean.nn.attention import host
from ipu_lean.nn.attention.hashing import Rotations, bucket_factors, columns_needed, hash_buckets
from ipu_lean.nn.attention.sorting import METHODS, WIDEST, bucket_order, digits, inverse

pytestmark = pytest.mark.pod


def reference_order(buckets):
    """Python's sort is stable."""
    rows = buckets.reshape(-1, buckets.shape[-1]).tolist()
    return torch.tensor([sorted(range(len(row)), key=row.__getitem__) for row in rows]).view(buckets.shape)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [1, 2, 3, 7, WIDEST, WIDEST + 1, 129, WIDEST**2 + 1, 8193])
def test_the_order_is_that_of_a_stable_sort(method, count):
    generator = torch.Generator().manual_seed(count)
    for shape in [(2, 3, 2, 96), (1, 1, 1, 1), (1, 2, 1, 61), (3, 1, 4, 128)]:
        buckets = torch.randint(count, shape, generator=generator)
        buckets[..., 0] = count - 1
        order, undo = bucket_order(buckets, count, method)
        assert torch.equal(order, reference_order(buckets))
        assert torch.equal(torch.gather(order, -1, undo), torch.arange(shape[-1]).expand(shape))
        assert order.dtype == undo.dtype == torch.int64 and torch.equal(undo, inverse(order))


def test_any_buckets_in_any_order():
    hypothesis = pytest.importorskip("hypothesis", reason="property tests need it")
    strategies = hypothesis.strategies

    @hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
    @hypothesis.given(
        strategies.integers(1, 2000).flatmap(
            lambda count: strategies.tuples(
                strategies.just(count), strategies.lists(strategies.integers(0, count - 1), min_size=1, max_size=90)
            )
        )
    )
    def both_methods(case):
        count, values = case
        buckets = torch.tensor(values).view(1, 1, 1, -1)
        expected = reference_order(buckets)
        for method in METHODS:
            order, undo = bucket_order(buckets, count, method)
            assert torch.equal(order, expected) and torch.equal(undo, inverse(expected))

    both_methods()


def test_digits_are_few_and_small():
    for count in [1, 2, 31, 32, 33, 64, 1024, 1025, 8192, 8193, 2**17]:
        passes, base = digits(count)
        assert base**passes >= count and base <= WIDEST
        assert passes == 1 or WIDEST ** (passes - 1) < count
        assert base == 2 or (base - 1) ** passes < count


def test_an_unknown_method_is_refused():
    with pytest.raises(ConfigError, match="sort or counting"):
        bucket_order(torch.zeros(1, 1, 1, 4, dtype=torch.int64), 1, "argsort")


def test_bucket_counts_follow_the_length():
    assert bucket_factors(4096, 64) == (128,)  # 2 max(sqrt(64), 64)
    assert bucket_factors(8192, 64) == (16, 16)
    assert bucket_factors(2**19, 64) == (2**7, 2**7)
    assert bucket_factors(8192, 64, longest=2**19) == (16, 16)  # 256 is above 2 * 90
    assert bucket_factors(4096, 64, longest=2**19) == (128,)
    assert bucket_factors(96, 32) == (4,)  # 2 * 3, rounded down to a power of two
    assert bucket_factors(64, 64) == (2,)
    assert bucket_factors(64, 64, 6) == (6,) and bucket_factors(64, 64, [4, 8]) == (4, 8)
    for wrong in (3, 0, [4, 5], []):
        with pytest.raises(ConfigError, match="even"):
            bucket_factors(64, 64, wrong)


def test_rotations_have_columns_for_every_shorter_sequence():
    for longest in (64, 96, 1024, 8192, 2**19):
        columns = columns_needed(longest, 32)
        found = {sum(bucket_factors(seq, 32, None, longest)) // 2 for seq in range(32, min(longest, 2**16) + 1, 32)}
        assert columns >= max(found)
    assert columns_needed(2**19, 64, [64, 128]) == 96


def hashed_by_hand(vector, rotation, factors):
    """One vector `[d]` and rotation `[d, columns]`: the digits by comparing all axes."""
    bucket, weight, start = 0, 1, 0
    for factor in factors:
        axes = [float(vector.detach() @ rotation[:, start + i]) for i in range(factor // 2)]
        axes += [-axis for axis in axes]
        bucket += weight * axes.index(max(axes))
        weight, start = weight * factor, start + factor // 2
    return bucket


@pytest.mark.parametrize("factors", [(2,), (8,), (4, 6), (2, 4, 2)])
def test_hashes_are_the_nearest_axes(factors):
    torch.manual_seed(1)
    qk = torch.randn(2, 12, 3, 5, dtype=torch.float64, requires_grad=True)
    rotations = torch.randn(3, 5, 2, 9, dtype=torch.float64)
    buckets, count = hash_buckets(qk, rotations, factors)
    assert count == torch.tensor(factors).prod() and buckets.shape == (2, 3, 2, 12) and not buckets.requires_grad
    for b, h, n, s in [(0, 0, 0, 0), (1, 2, 1, 11), (0, 1, 1, 7), (1, 0, 0, 3)]:
        assert buckets[b, h, n, s] == hashed_by_hand(qk[b, s, h], rotations[h, :, n], factors)
    present = torch.ones(2, 12, dtype=torch.bool)
    present[1, 5:] = False
    padded, more = hash_buckets(qk, rotations, factors, present)
    assert more == count + 1
    assert torch.equal(padded[0], buckets[0]) and torch.equal(padded[1, ..., :5], buckets[1, ..., :5])
    assert (padded[1, ..., 5:] == count).all()


def test_pieces_of_a_sequence_hash_as_the_whole(monkeypatch):
    torch.manual_seed(1)
    qk, rotations = torch.randn(2, 50, 3, 5), torch.randn(3, 5, 2, 9)
    whole = hash_buckets(qk, rotations, (4, 6))[0]
    for tokens in (1, 7, 50):
        monkeypatch.setattr(host, "tokens_at_once", lambda bytes_each: tokens)  # noqa: B023
        assert torch.equal(hash_buckets(qk, rotations, (4, 6))[0], whole)
    monkeypatch.setattr(host, "usable", lambda x: False)
    assert torch.equal(hash_buckets(qk, rotations, (4, 6))[0], whole)


def test_equal_distances_go_to_the_first_axis():
    buckets, _ = hash_buckets(torch.zeros(1, 4, 1, 3), torch.ones(1, 3, 1, 4), (8,))
    assert (buckets == 0).all()


def test_rotations_are_drawn_from_seed_layer_and_step_alone():
    before = torch.get_rng_state()
    one, other = Rotations(2, 8, 2, 4, seed=1, layer=3), Rotations(2, 8, 2, 4, seed=1, layer=3)
    assert torch.equal(one.rotations, other.rotations) and "rotations" not in one.state_dict()
    assert abs(float(one.rotations.std()) - 1) < 0.2
    first = one.rotations.clone()
    one.redraw(5)
    other.redraw(2)
    assert not torch.equal(one.rotations, first) and not torch.equal(one.rotations, other.rotations)
    other.redraw(5)
    assert torch.equal(one.rotations, other.rotations)
    assert not torch.equal(Rotations(2, 8, 2, 4, 1, 4).rotations, first)
    assert not torch.equal(Rotations(2, 8, 2, 4, 2, 3).rotations, first)
    assert torch.equal(before, torch.get_rng_state())


def test_more_rounds_leave_the_first_ones():
    rotations = Rotations(2, 8, 1, 4, 0, 0)
    first = rotations.rotations.clone()
    rotations.set_hashes(4)
    assert rotations.rotations.shape == (2, 8, 4, 4)
    assert torch.equal(rotations.rotations[:, :, :1], first)
    rotations.set_hashes(1)
    assert torch.equal(rotations.rotations, first)


def test_rotations_survive_copies_types_and_meta():
    rotations = Rotations(2, 8, 2, 4, 0, 0)
    rotations.redraw(7)
    drawn = rotations.tables()["rotations"]
    assert torch.equal(copy.deepcopy(rotations).rotations, rotations.rotations)
    assert torch.equal(copy.deepcopy(rotations).half().rotations, drawn.half())
    assert torch.equal(copy.deepcopy(rotations).double().rotations, drawn)
    with torch.device("meta"):
        empty = Rotations(2, 8, 2, 4, 0, 0)
    empty.redraw(7)
    assert empty.rotations.is_meta
    assert torch.equal(copy.deepcopy(empty).to_empty(device="cpu").rotations, drawn.float())
    assert torch.equal(empty.like(torch.zeros(1, dtype=torch.float64)), drawn.float().double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_host_searches_as_torch_does(dtype):
    generator = torch.Generator().manual_seed(3)
    for columns in (1, 3, 16, 70):
        smooth = torch.randn(2, 3, 2, columns, 50, generator=generator).to(dtype)
        coarse = torch.randint(-2, 3, (2, 3, 2, columns, 50), generator=generator).to(dtype)  # mostly ties
        for x in (smooth, coarse, smooth[..., : (columns + 1) // 2, ::2], torch.zeros(1, 1, 1, columns, 4, dtype=dtype)):
            assert host.usable(x)
            assert torch.equal(host.nearest_axis(x).long(), torch.cat([x, -x], -2).argmax(-2))


@pytest.mark.parametrize("count", [2, 2**15, 2**15 + 1, 2**20])
def test_the_host_sorts_as_torch_does(count):
    buckets = torch.randint(count, (2, 3, 200, 2), generator=torch.Generator().manual_seed(4))
    buckets[0, 0, 5:50] = count - 1
    buckets = buckets.transpose(2, 3)
    assert torch.equal(host.stable_order(buckets, count), buckets.sort(dim=-1, stable=True)[1])


def test_the_host_is_left_alone_by_whoever_watches_operations():
    from torch.fx.experimental.proxy_tensor import make_fx

    buckets = torch.randint(5, (1, 2, 1, 12))
    order = bucket_order(buckets, 5)[0]
    seen = []

    def watched(buckets):
        seen.append(host.usable(buckets))
        return bucket_order(buckets, 5)[0]

    traced = make_fx(watched)(buckets)
    assert torch.equal(traced(buckets), order) and not torch.equal(traced(4 - buckets), order)
    assert torch.equal(torch.func.vmap(watched)(buckets), order)
    assert torch.equal(torch.jit.trace(watched, buckets, check_trace=False)(buckets), order)
    assert seen == [False, False, False] and host.usable(buckets) and not host.usable(buckets.to("meta"))


def test_the_host_works_on_where_somebody_only_counts():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Counting(Mode):
        passive = True

    buckets = torch.randint(5, (1, 2, 1, 12))
    with Counting():
        assert host.usable(buckets) and torch.equal(bucket_order(buckets, 5)[0], buckets.sort(stable=True)[1])
        with Mode():
            assert not host.usable(buckets)
