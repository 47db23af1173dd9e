"""Local and hashed attention with a cache against the whole layer, token by token in double precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ipu_lean.errors import ConfigError
from ipu_lean.nn import KVCache, Rotary
from ipu_lean.nn.attention import LocalSelfAttention, LSHSelfAttention
from ipu_lean.nn.attention.cache import Rows
from ipu_lean.nn.attention.incremental import _inserted

pytestmark = pytest.mark.pod
WIDTH, HEADS, SIZE, CHUNK = 12, 2, 4, 4


def drawn(module):
    torch.manual_seed(1)
    for parameter in module.double().parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return module.eval()


def local(**options):
    return drawn(LocalSelfAttention(WIDTH, HEADS, SIZE, chunk=CHUNK, **{"before": 1, "after": 0, "causal": True, **options}))


def lsh(**options):
    return drawn(LSHSelfAttention(WIDTH, HEADS, SIZE, chunk=CHUNK, seq=64, **options))


def inputs(batch=2, length=40):
    return torch.randn(batch, length, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def new_cache(batch=2, length=64, **options):
    return KVCache(1, batch, HEADS, length, SIZE, torch.float64, torch.device("cpu"), **options)


def read(module, cache, x):
    """One pass of a model of one layer."""
    cache.begin(x.shape[1])
    y = module(x, cache=cache)
    cache.finish()
    return y


def in_pieces(module, cache, x, pieces):
    parts, start = [], 0
    for count in pieces:
        parts.append(read(module, cache, x[:, start : start + count]))
        start += count
    assert start == x.shape[1]
    return torch.cat(parts, 1)


def whole(module, x, most=CHUNK, multiple=CHUNK):
    """The layer without a cache, padded as a model pads."""
    length = x.shape[1]
    if length <= most or length % multiple == 0:
        return module(x)
    more = -length % multiple
    present = torch.arange(length + more).lt(length).expand(x.shape[0], -1)
    return module(F.pad(x, (0, 0, 0, more), value=0.7), present=present)[:, :length]


@torch.no_grad()
@pytest.mark.parametrize("pieces", [[1] * 23, [5, 1, 1, 9, 1, 6], [23], [4, 4, 15]])
@pytest.mark.parametrize("options", [{}, {"before": 0}, {"positions": Rotary(64, SIZE).double(), "scale": 0.9}])
def test_local_attention_gives_the_numbers_of_the_whole(options, pieces):
    module, x = local(**options), inputs(length=23)
    assert torch.allclose(in_pieces(module, new_cache(), x, pieces), whole(module, x), rtol=1e-12, atol=1e-13)


@torch.no_grad()
@pytest.mark.parametrize(
    "module, most",
    [
        (lambda: local(before=2), CHUNK),
        (lambda: lsh(), CHUNK),
        (lambda: lsh(hashes=3, score_mult=1.7), CHUNK),
        (lambda: lsh(hashes=2, buckets=[2, 4], before=2), CHUNK),
        (lambda: lsh(buckets=6, before=0, hashes=2), CHUNK),
        (lambda: lsh(hashes=2, after=1), CHUNK),
        (lambda: lsh(full_below=18), 18),
        (lambda: lsh(positions=Rotary(64, SIZE).double()), CHUNK),
    ],
    ids=["local-2", "plain", "three-rounds", "two-factors", "no-neighbours", "after", "full-below", "rotary"],
)
@pytest.mark.parametrize("prompt", [1, 3, 10, 16])
def test_a_new_token_gets_what_the_whole_layer_would_give_the_last_one(module, most, prompt):
    """At every length: within one chunk, at its end, beyond it, and where the number of buckets doubles."""
    module, x, cache = module(), inputs(), new_cache()
    first = read(module, cache, x[:, :prompt])
    assert torch.allclose(first, whole(module, x[:, :prompt], most), rtol=1e-12, atol=1e-13)
    for length in range(prompt + 1, x.shape[1] + 1):
        new = read(module, cache, x[:, length - 1 : length])
        expected = whole(module, x[:, :length], most)[:, -1:]
        assert torch.allclose(new, expected, rtol=1e-12, atol=1e-13), length
    assert cache.reused == sum(range(prompt, x.shape[1]))


@torch.no_grad()
def test_the_length_that_a_model_pads_to_decides():
    """Other layers of a model may need longer multiples; buckets and the last chunk's neighbours follow the padded length."""
    module, x = lsh(hashes=2), inputs(length=30)
    cache = new_cache(pad=lambda length: length if length <= 4 else -(-length // 12) * 12)
    read(module, cache, x[:, :7])
    for length in range(8, 31):
        new = read(module, cache, x[:, length - 1 : length])
        assert torch.allclose(new, whole(module, x[:, :length], 4, 12)[:, -1:], rtol=1e-12, atol=1e-13), length


@torch.no_grad()
@pytest.mark.parametrize("module", [local, lambda: lsh(hashes=2)])
@pytest.mark.parametrize("prompt", [1, 6, 13])
def test_every_row_of_a_batch_is_its_own_run(module, prompt):
    """Rows differ in their buckets, so each has an order of its own."""
    module, x = module(), inputs(batch=3)
    pieces = [prompt] + [1] * (x.shape[1] - prompt)
    together = in_pieces(module, new_cache(3), x, pieces)
    for row in range(3):
        alone = in_pieces(module, new_cache(1), x[row : row + 1], pieces)
        assert torch.allclose(together[row : row + 1], alone, rtol=1e-12, atol=1e-13)


@torch.no_grad()
def test_other_rotations_and_more_rounds_give_another_order():
    module, x, cache = lsh(hashes=2), inputs(), new_cache()
    read(module, cache, x[:, :30])
    read(module, cache, x[:, 30:31])
    for length, change in ((32, lambda: module.redraw(7)), (34, lambda: module.set_hashes(4))):
        before = whole(module, x[:, :length])[:, -1:]
        change()
        expected = whole(module, x[:, :length])[:, -1:]
        assert not torch.allclose(before, expected, atol=1e-6)
        assert torch.allclose(read(module, cache, x[:, length - 1 : length]), expected, rtol=1e-12, atol=1e-13)
        read(module, cache, x[:, length : length + 1])


@torch.no_grad()
@pytest.mark.parametrize("module", [local, lambda: lsh(hashes=2)])
def test_a_pass_that_failed_can_be_made_again(module):
    module, x, cache = module(), inputs(), new_cache()
    read(module, cache, x[:, :20])
    cache.begin(1)
    module(x[:, 39:], cache=cache)  # and then the next layer fails
    assert torch.allclose(read(module, cache, x[:, 20:21]), whole(module, x[:, :21])[:, -1:], rtol=1e-12, atol=1e-13)
    cache.reset()
    assert cache.length == cache.reused == 0
    assert torch.allclose(in_pieces(module, cache, x[:, :9], [8, 1])[:, -1:], whole(module, x[:, :9])[:, -1:], rtol=1e-12)


@torch.no_grad()
def test_local_attention_keeps_two_chunks_or_so():
    module, cache = local(), new_cache(length=400)
    x = inputs(length=400)
    last = in_pieces(module, cache, x, [100] + [1] * 300)[:, -1:]
    assert torch.allclose(last, whole(module, x)[:, -1:], rtol=1e-12, atol=1e-13)
    held = cache._places[0].rows["keys"]
    assert held.stop == 400 and held.stop - held.first < 200 and held.first > 0


@torch.no_grad()
@pytest.mark.parametrize("module", [local, lambda: lsh(hashes=2)])
def test_under_autocast(module):
    module, x = module().float(), inputs().float()
    with torch.autocast("cpu", torch.bfloat16):
        found = in_pieces(module, new_cache(), x, [13] + [1] * 27)[:, -1:]
    expected = whole(module, x)[:, -1:]
    assert (found.float() - expected).norm() < 0.05 * expected.norm()


def test_rows_grow_without_losing_any():
    rows, every = Rows(), torch.randn(2, 100, 3)
    for at, count in ((0, 1), (1, 5), (6, 40), (46, 54)):
        rows.write(every[:, at : at + count], at, 100)
        assert torch.equal(rows.read(), every[:, : at + count])
    rows.give_up(70)
    assert rows.first == 70 and torch.equal(rows.read(80), every[:, 80:])
    with pytest.raises(AssertionError):
        rows.read(0)


def test_inserting_keeps_a_sorted_order():
    keys = torch.randint(0, 5, (3, 2, 30), generator=torch.Generator().manual_seed(0))
    order = keys[..., :1].sort(dim=-1, stable=True)[1]
    for length in range(1, 30):
        rank = (keys[..., :length] <= keys[..., length : length + 1]).sum(-1, keepdim=True)
        order = _inserted(order, rank)
        assert torch.equal(order, keys[..., : length + 1].sort(dim=-1, stable=True)[1])


@torch.no_grad()
@pytest.mark.parametrize("make", [local, lsh])
def test_refusals(make):
    x, cache = inputs(), new_cache()
    cache.begin(8)
    with pytest.raises(ConfigError, match="from left to right"):
        make()(x[:, :8], present=torch.ones(2, 8, dtype=torch.bool), cache=cache)
    with pytest.raises(ConfigError, match="from left to right"):
        make(causal=False)(x[:, :8], cache=cache)
    with pytest.raises(ConfigError, match="the cache holds 64 positions"):
        cache.begin(65)
