"""Attention: every implementation against loops over queries in double precision, masks, cache, causality, dropout."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.utils import prune

from ipu_lean.errors import ConfigError
from ipu_lean.nn import CausalSelfAttention, KVCache, Rotary
from ipu_lean.nn.attention import IMPLEMENTATIONS, blockwise

pytestmark = pytest.mark.pod


@pytest.fixture(autouse=True)
def blocks_at_every_length(monkeypatch):
    """`fused` picks blocks of queries where they gain; here always, so that short sequences test them."""
    monkeypatch.setattr(blockwise, "worthwhile", lambda seq, bytes_each: True)


def make(width=12, heads=3, implementation="fused", seed=0, **options):
    torch.manual_seed(seed)
    module = CausalSelfAttention(width, heads, implementation=implementation, **options).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=1.5 * width**-0.5)
    return module


def by_loops(module, x, mask=None):
    """The definition, one query at a time; `mask` is added to the scores, [batch, heads, seq, keys]."""

    def project(layer):
        y = x @ layer.linear.weight.t() + layer.linear.bias
        return y.view(*x.shape[:2], module.heads, module.head_size)

    q, k, v = project(module.query), project(module.key), project(module.value)
    if module.positions is not None:
        q, k = module.positions(q), module.positions(k)
    rows = []
    for i in range(x.shape[1]):
        scores = module.scale * torch.einsum("bhd,bkhd->bhk", q[:, i], k[:, : i + 1])
        if mask is not None:
            scores = scores + mask[..., i, : i + 1]
        weights = torch.exp(scores - scores.max(-1, keepdim=True).values)
        weights = weights / weights.sum(-1, keepdim=True)
        rows.append(torch.einsum("bhk,bkhd->bhd", weights, v[:, : i + 1]).flatten(1))
    return torch.stack(rows, 1) @ module.out.linear.weight.t() + module.out.linear.bias


def gradients(module, y, x):
    parameters = dict(module.named_parameters())
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(y.dtype)
    found = torch.autograd.grad(y, [x, *parameters.values()], seed)
    return dict(zip(["x", *parameters], found))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "batch,seq,width,heads", [(2, 1, 12, 3), (1, 7, 12, 3), (3, 150, 16, 1), (2, 130, 24, 6), (1, 65, 36, 18)]
)
def test_equals_the_definition(implementation, batch, seq, width, heads):
    rotary = Rotary(160, width // heads).double() if (width // heads) % 2 == 0 else None
    module = make(width, heads, implementation, positions=rotary, scale=0.3)
    x = torch.randn(batch, seq, width, dtype=torch.float64, requires_grad=True)
    expected, got = by_loops(module, x), module(x)
    assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)
    reference, ours = gradients(module, expected, x), gradients(module, got, x)
    for name, gradient in reference.items():
        if name == "key.linear.bias" and rotary is None:  # softmax does not see a constant in a row
            assert ours[name].abs().max() < 1e-9
        elif seq > 1 or name.split(".")[0] not in ("query", "key"):
            assert gradient.norm() > 0
            assert (ours[name] - gradient).norm() <= 1e-11 * gradient.norm(), name


def test_implementations_agree_in_float32():
    module = make(64, 4, scale=0.4, positions=Rotary(200, 16)).float()
    x = torch.randn(4, 200, 64)
    results = {}
    for implementation in IMPLEMENTATIONS:
        module.set_implementation(implementation)
        results[implementation] = module(x)
    for got in results.values():
        assert (got - results["explicit"]).norm() < 1e-6 * got.norm()


@pytest.mark.parametrize("kind", ["bool", "float", "per-head"])
def test_a_mask_comes_on_top_of_the_causal_one(kind):
    module = make(12, 3)
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    allowed = torch.rand(2, 1, 6, 6) > 0.4
    allowed |= torch.eye(6, dtype=torch.bool)
    added = torch.zeros(2, 1, 6, 6, dtype=torch.float64).masked_fill(~allowed, -math.inf)
    if kind != "bool":
        added = torch.randn(2, 3 if kind == "per-head" else 1, 6, 6, dtype=torch.float64)
    expected = by_loops(module, x, added)
    for implementation in IMPLEMENTATIONS:
        module.set_implementation(implementation)
        got = module(x, mask=allowed if kind == "bool" else added)
        assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12), implementation


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_in_which_everything_is_masked_is_finite(implementation):
    module = make(8, 2, implementation).float()
    y = module(torch.randn(1, 4, 8), mask=torch.zeros(1, 1, 4, 4, dtype=torch.bool))
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_future_is_not_seen(implementation):
    module = make(16, 2, implementation, positions=Rotary(140, 8).double())
    x = torch.randn(1, 140, 16, dtype=torch.float64)
    changed = x.clone()
    changed[:, 100] += 1
    difference = (module(changed) - module(x)).abs().amax(-1)[0]
    assert difference[:100].max() == 0 and difference[100:].min() > 0


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("pieces", [[1] * 9, [4, 1, 1, 3], [9]])
def test_cache_gives_the_numbers_of_the_whole(implementation, pieces):
    module = make(12, 3, implementation, positions=Rotary(16, 4).double()).eval()
    x = torch.randn(2, 9, 12, dtype=torch.float64)
    cache = KVCache(1, 2, 3, 12, 4, torch.float64, torch.device("cpu"))
    parts, start = [], 0
    with torch.no_grad():
        for count in pieces:
            cache.begin(count)
            parts.append(module(x[:, start : start + count], cache=cache))
            cache.finish()
            start += count
        assert torch.allclose(torch.cat(parts, 1), module(x), rtol=1e-12, atol=1e-12)
    with pytest.raises(ConfigError):
        cache.begin(4)
    cache.reset()
    cache.begin(12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_attention_dropout_only_in_training(implementation):
    module = make(16, 2, implementation, attention_dropout=0.5)
    x = torch.randn(1, 8, 16, dtype=torch.float64)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.allclose(module(x), by_loops(module, x), atol=1e-12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_autocast_stays_near_float32(implementation):
    module = make(64, 4, implementation, positions=Rotary(100, 16)).float()
    x = torch.randn(2, 100, 64, requires_grad=True)
    exact = gradients(module, module(x), x)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16
    rough = gradients(module, y, x)
    for name in exact:
        assert (rough[name] - exact[name]).norm() < 0.05 * exact[name].norm(), name


def test_scale_is_the_reciprocal_root_unless_given():
    assert make(36, 4).scale == pytest.approx(1 / 3)


def test_query_zero_init_makes_attention_uniform():
    module = CausalSelfAttention(8, 2, query_zero_init=True)
    x = torch.randn(1, 5, 8)
    value = module.value(x)
    uniform = torch.stack([value[:, : i + 1].mean(1) for i in range(5)], 1)
    assert torch.allclose(module(x), module.out(uniform), atol=1e-6)


def test_blockwise_saves_its_input_only_and_refuses_second_derivatives():
    packed = torch.randn(1, 300, 3, 2, 4, dtype=torch.float64, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        y = blockwise.blockwise_attention(packed, None, 0.5)
    assert kept == [packed.data_ptr()]
    (first,) = torch.autograd.grad(y.pow(2).sum(), [packed], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_projections_that_are_watched_or_replaced_are_called():
    """Blockwise attention multiplies by the three matrices at once, unless somebody would notice."""
    module = make(16, 2, positions=Rotary(9, 8).double())
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    expected, seen = module(x), []
    handle = module.key.linear.register_forward_hook(lambda *_: seen.append(1))
    assert torch.allclose(module(x), expected, rtol=1e-12) and seen == [1]
    handle.remove()
    module(x)
    assert seen == [1]
    prune.identity(module.value.linear, "weight")
    with torch.no_grad():
        module.value.linear.weight_mask.zero_()  # what the hook multiplies the weight with before each call
    assert torch.allclose(module(x), module.out(module.value.linear.bias.expand_as(x)), atol=1e-12)


@pytest.mark.parametrize("seq,heads,batch", [(1, 1, 1), (5, 2, 3), (64, 4, 3), (129, 5, 7), (513, 3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotary", [False, True])
def test_blockwise_at_awkward_sizes(seq, heads, batch, dtype, rotary):
    torch.manual_seed(0)
    packed = torch.randn(batch, seq, 3, heads, 6).to(dtype).requires_grad_()
    seed = torch.randn(batch, seq, heads, 6).to(dtype)
    positions = Rotary(seq, 6)
    y = blockwise.blockwise_attention(packed, positions.rows(packed, 0) if rotary else None, 0.7)
    (ours,) = torch.autograd.grad(y, packed, seed)
    exact = packed.detach().double().requires_grad_()
    q, k, v = exact.unbind(2)
    if rotary:
        positions.double()
        q, k = positions(q), positions(k)
    scores = 0.7 * torch.einsum("bqhd,bkhd->bhqk", q, k) + torch.full((seq, seq), -math.inf, dtype=torch.float64).triu(1)
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    (reference,) = torch.autograd.grad(expected, exact, seed.double())
    limit = 2e-6 if dtype == torch.float32 else 0.03
    assert (y.double() - expected).norm() <= limit * expected.norm()
    assert (ours.double() - reference).norm() <= limit * reference.norm()


def test_mistakes():
    with pytest.raises(ConfigError):
        CausalSelfAttention(10, 3)
    with pytest.raises(ConfigError):
        CausalSelfAttention(8, 2, implementation="flash")
    with pytest.raises(ConfigError):
        make(8, 2).set_implementation("x")


# -- both ways, padding, heads of any size -----------------------------------------------------------------------------------
def seen_by_loops(module, x, present, causal):
    """The definition with a choice of keys for each token: those that are there and, if causal, not after it."""
    layers = (module.query, module.key, module.value)
    q, k, v = (torch.nn.functional.linear(x, layer.linear.weight, layer.linear.bias) for layer in layers)
    q, k, v = (t.view(*x.shape[:2], module.heads, module.head_size) for t in (q, k, v))
    if module.positions is not None:
        q, k = module.positions(q), module.positions(k)
    rows = torch.zeros(*x.shape[:2], module.heads * module.head_size, dtype=x.dtype)
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            keys = [j for j in range(i + 1 if causal else x.shape[1]) if present is None or present[b, j]]
            if not keys:
                continue
            scores = module.scale * torch.einsum("hd,khd->hk", q[b, i], k[b, keys])
            rows[b, i] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[b, keys]).flatten()
    return torch.nn.functional.linear(rows, module.out.linear.weight, module.out.linear.bias)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_size, bias", [(4, True), (6, False)])
def test_both_ways_with_padding_and_a_head_size_of_its_own(implementation, causal, head_size, bias):
    options = {"head_size": head_size, "causal": causal, "bias": bias, "positions": Rotary(9, head_size).double()}
    module = make(implementation=implementation, **options)
    x = torch.randn(3, 9, 12, dtype=torch.float64, requires_grad=True)
    present = torch.ones(3, 9, dtype=torch.bool)
    present[0, 6:] = present[1, :2] = False
    for given in (None, present):
        ours, truth = module(x, present=given), seen_by_loops(module, x, given, causal)
        if given is not None:  # causal rows before the first token see nothing, and mean nothing
            ours, truth = (t * present[..., None] for t in (ours, truth))
        assert (ours - truth).norm() < 1e-12 * truth.norm()
        expected = gradients(module, truth, x)
        for name, found in gradients(module, ours, x).items():
            assert expected[name].norm() > 0 and (found - expected[name]).norm() < 1e-11 * expected[name].norm(), name


def test_a_cache_takes_no_padding_and_no_look_ahead():
    x = torch.randn(2, 3, 12, dtype=torch.float64)
    for module, given in ((make(), {"present": torch.ones(2, 3, dtype=torch.bool)}), (make(causal=False), {})):
        with pytest.raises(ConfigError, match="left to right"):
            module(x, cache=KVCache(1, 2, 3, 8, 4, torch.float64, torch.device("cpu")), **given)


@pytest.mark.parametrize("kind", [torch.bool, torch.float64])
def test_padding_comes_on_top_of_a_mask(kind):
    module = make(causal=False)
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    present = torch.arange(7).expand(2, 7) < torch.tensor([[7], [5]])
    mask = torch.ones(7, 7, dtype=torch.bool).tril(2)
    both = mask & present[:, None, None, :]
    given = mask if kind == torch.bool else (mask.double() - 1) * 1e4
    assert torch.allclose(module(x, mask=given, present=present), module(x, mask=both), rtol=1e-13, atol=0)
